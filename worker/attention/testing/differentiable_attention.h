// Attention under LibTorch's autograd, for tests that compare with what autograd derives.
#pragma once

#include <torch/types.h>

#include "worker/attention/runner/context_attention.h"

namespace ringleader::attention::testing {

// ContextAttention::Forward and its record's Backward as one differentiable function, which keeps
// q, k, v, out and lse. `attention` outlives the graph.
torch::Tensor DifferentiableAttention(ContextAttention& attention, int layer,
                                      const torch::Tensor& q, const torch::Tensor& k,
                                      const torch::Tensor& v);

}  // namespace ringleader::attention::testing
