// Cross entropy over a large vocabulary without holding all logits.
#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace ringleader::model {

// The summed cross entropy of softmax(hidden head^T) against labels, an fp64 scalar; differentiable
// in hidden and head. hidden: [n, hidden_size]; head: [vocab, hidden_size]; labels: [n] int64,
// `ignore_label` where there is none. Logits are computed for a chunk of tokens at a time. When a
// gradient is wanted it is computed in the same pass, for a unit upstream gradient, and scaled in
// backward: the loss must be the last thing in the graph but for scaling.
torch::Tensor LinearCrossEntropySum(const torch::Tensor& hidden, const torch::Tensor& head,
                                    const torch::Tensor& labels, int64_t ignore_label);

}  // namespace ringleader::model
