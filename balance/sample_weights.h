// What training on a sample is predicted to take, by its tokens: rows of a plan, and between them
// lines: of what a token takes where that grows, as attention makes it, so that a square between
// two rows is met exactly, and else of what a sample takes.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringleader::balance {

struct SampleWeight {
  uint64_t tokens = 0;
  double milliseconds = 0;
  double attention_milliseconds = 0;  // a part of milliseconds
  // Not a part of them: what its keys, values and their gradients take to travel where it is a
  // document that is spread over ranks.
  double travel_milliseconds = 0;

  bool operator==(const SampleWeight&) const = default;
};

// Immutable. Whole microseconds: sums of them are exact, so that every rank that adds them up in
// any order deals alike.
class SampleWeights {
 public:
  // A sample weighs as many microseconds as it has tokens.
  SampleWeights() = default;
  // INVALID_ARGUMENT unless tokens ascend strictly, milliseconds are finite, not negative and do
  // not descend, attention's are a part of them, and so are travel's finite and not negative. No
  // rows: as above.
  static absl::StatusOr<SampleWeights> Create(std::vector<SampleWeight> rows);

  // Returns at least 1; outside of the rows, by the line from the origin through the nearest.
  int64_t Microseconds(uint64_t tokens) const;
  // Returns what attention takes of Microseconds(); 0 where the rows do not say.
  int64_t AttentionMicroseconds(uint64_t tokens) const;
  // Returns what its keys take to travel where it is spread; 0 where the rows do not say.
  double TravelMicroseconds(uint64_t tokens) const;
  // Returns the bin by which figures of a length are kept: the tokens of the first row with at
  // least so many, or of the last row; without rows, the next power of two.
  uint64_t BinOf(uint64_t tokens) const;

  bool operator==(const SampleWeights&) const = default;

 private:
  double Interpolate(uint64_t tokens, double SampleWeight::*value) const;

  std::vector<SampleWeight> rows_;
};

}  // namespace ringleader::balance
