// A golden model's tokens and labels as one sequence.
#pragma once

#include "worker/model/decoder/decoder.h"
#include "worker/model/testing/golden.h"

namespace ringleader::model {

inline TokenBatch BatchOf(const Golden& golden) {
  const int64_t n = golden.expected.at("tokens").size(0);
  return {.tokens = golden.expected.at("tokens").to(torch::kInt64),
          .positions = torch::arange(n),
          .labels = golden.expected.at("labels").to(torch::kInt64),
          .sequence_length = n};
}

}  // namespace ringleader::model
