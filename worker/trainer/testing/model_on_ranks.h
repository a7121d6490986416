// A sequence through a whole model, forward and backward, on ranks that share it: a thread each.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "patterns/attention_options.h"
#include "worker/attention/runner/context_attention.h"

namespace ringleader::trainer::testing {

struct ModelResult {
  double loss = 0;                                 // summed over the sequence
  torch::Tensor losses;                            // [tokens], in the sequence's order
  std::map<std::string, torch::Tensor> gradients;  // of the sum, by parameter
};

// What a model is trained on in these tests.
struct Sequence {
  torch::Tensor tokens, labels;
  std::vector<int64_t> document_firsts = {}, prefix_ends = {};
  std::string model = "qwen2";  // a golden one

  int64_t length() const { return tokens.size(0); }
};

// Random tokens, each labelled with the next one.
Sequence WholeSequence(int64_t tokens);
// The same tokens as documents, none of whose first tokens is predicted.
Sequence PackedSequence(int64_t tokens, const std::vector<int64_t>& firsts);

ModelResult RunOnRanks(const Sequence& sequence, const patterns::AttentionOptions& options,
                       int ranks);
// On one rank, with `attention` as it is.
ModelResult RunWith(const Sequence& sequence, attention::ContextAttention& attention);

// Losses and gradients differ by rounding alone.
void ExpectNear(const ModelResult& actual, const ModelResult& expected);

}  // namespace ringleader::trainer::testing
