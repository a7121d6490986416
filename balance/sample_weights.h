// What training on a sample is predicted to take, by its tokens: rows of a plan, and lines between
// them.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringleader::balance {

struct SampleWeight {
  uint64_t tokens = 0;
  double milliseconds = 0;
  double attention_milliseconds = 0;  // of milliseconds

  bool operator==(const SampleWeight&) const = default;
};

// Immutable. Whole microseconds: sums of them are exact, so that every rank that adds them up in
// any order deals alike.
class SampleWeights {
 public:
  // By tokens alone.
  SampleWeights() = default;
  // INVALID_ARGUMENT unless tokens ascend strictly, milliseconds are finite, not negative and do
  // not descend, and attention's are a part of them. No rows: by tokens alone.
  static absl::StatusOr<SampleWeights> Create(std::vector<SampleWeight> rows);

  // At least 1. Beyond the rows, along the line from the origin through the nearest.
  int64_t Microseconds(uint64_t tokens) const;
  // What attention takes of Microseconds(); 0 where the rows do not say.
  int64_t AttentionMicroseconds(uint64_t tokens) const;
  // The tokens of the first row with at least so many, or of the last; without rows: the next power
  // of two. What is known by length is kept by these.
  uint64_t BinOf(uint64_t tokens) const;

  bool operator==(const SampleWeights&) const = default;

 private:
  double Interpolate(uint64_t tokens, double SampleWeight::*value) const;

  std::vector<SampleWeight> rows_;
};

}  // namespace ringleader::balance
