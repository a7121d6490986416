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
};

// Immutable. Whole microseconds: sums of them are exact, so that every rank that adds them up in
// any order deals alike.
class SampleWeights {
 public:
  // By tokens alone.
  SampleWeights() = default;
  // INVALID_ARGUMENT unless tokens ascend strictly and milliseconds are finite, not negative and do
  // not descend. No rows: by tokens alone.
  static absl::StatusOr<SampleWeights> Create(std::vector<SampleWeight> rows);

  // At least 1. Beyond the rows, along the line from the origin through the nearest.
  int64_t Microseconds(uint64_t tokens) const;

 private:
  std::vector<SampleWeight> rows_;
};

}  // namespace ringleader::balance
