// A rank's rows of a whole sequence's tensors.
#pragma once

#include <torch/torch.h>

#include <cstdint>

#include "bench/longca/ranks/rank_run.h"
#include "bench/longca/ranks/scheme.h"
#include "kernels/reference/testing/masked_attention.h"

namespace ringleader::bench {

// Shares the memory.
inline torch::Tensor AsTorch(const kernels::reference::testing::Tensor& tensor) {
  return torch::from_blob(const_cast<float*>(tensor.data.data()),
                          {tensor.tokens, tensor.heads, tensor.head_dim});
}

class RankRows {
 public:
  RankRows(const Scheme& scheme, int rank, int64_t tokens, int tile)
      : positions_(torch::tensor(scheme.PositionsOf(rank, tokens, tile), torch::kLong)) {}

  int64_t count() const { return positions_.numel(); }
  // fp32, on the CPU.
  torch::Tensor Of(const kernels::reference::testing::Tensor& whole) const {
    return AsTorch(whole).index_select(0, positions_);
  }
  // Rows of any type and device.
  void Put(const torch::Tensor& out, const torch::Tensor& dq, const torch::Tensor& dk,
           const torch::Tensor& dv, Results* results) const {
    const auto put = [&](const torch::Tensor& rows,
                         const kernels::reference::testing::Tensor& whole) {
      AsTorch(whole).index_copy_(0, positions_, rows.to(torch::kFloat).cpu());
    };
    put(out, results->out);
    put(dq, results->dq);
    put(dk, results->dk);
    put(dv, results->dv);
  }

 private:
  const torch::Tensor positions_;
};

}  // namespace ringleader::bench
