// Causal softmax attention on one rank without autograd, in fp32 whatever q's type: for tests of
// models whose heads the kernels do not take.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <span>

#include "worker/attention/runner/context_attention.h"

namespace ringleader::model {

class DenseContextAttention : public attention::ContextAttention {
 public:
  attention::AttentionOutput Forward(int /*layer*/, const torch::Tensor& q, const torch::Tensor& k,
                                     const torch::Tensor& v) override {
    const torch::Tensor logits = Logits(q, k);
    return {.out = logits.softmax(-1)
                       .matmul(ByHead(v, q.size(1)))
                       .transpose(0, 1)
                       .contiguous()
                       .to(q.scalar_type()),
            .lse = logits.logsumexp(-1),
            .record = std::make_shared<Record>()};
  }
  void SetDense(bool /*dense*/) override {}
  absl::Status SetDocuments(int64_t /*tokens*/, std::span<const int64_t> firsts,
                            int64_t /*padding*/) override {
    return firsts.size() < 2 ? absl::OkStatus()
                             : absl::InvalidArgumentError("one document a sequence, in this test");
  }
  absl::Status SetLayout(const ring::DocumentLayout& /*layout*/) override {
    return absl::InvalidArgumentError("one rank, in this test");
  }
  void SetStep(uint64_t /*step*/) override {}
  void SetMove(float /*factor*/) override {}
  void MarkMicroBatch() override {}
  attention::AttentionStats TakeStats() override { return {}; }

 private:
  class Record : public attention::AttentionRecord {
   public:
    attention::AttentionGradients Backward(const torch::Tensor& q, const torch::Tensor& k,
                                           const torch::Tensor& v, const torch::Tensor& out,
                                           const torch::Tensor& lse,
                                           const torch::Tensor& d_out) const override {
      const int64_t heads = q.size(1), kv_heads = k.size(1);
      const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(2)));
      const torch::Tensor p = (Logits(q, k) - lse.unsqueeze(2)).exp();  // [heads, n, n]
      const torch::Tensor upstream = ByHead(d_out, heads);
      const torch::Tensor delta = (upstream * ByHead(out, heads)).sum(-1, /*keepdim=*/true);
      const torch::Tensor ds =
          p * (upstream.matmul(ByHead(v, heads).transpose(1, 2)) - delta) * scale;
      // [heads, n, d] -> [n, kv_heads, d], summed over a group's query heads.
      const auto to_kv = [&](const torch::Tensor& x) {
        return x.view({kv_heads, heads / kv_heads, x.size(1), x.size(2)})
            .sum(1)
            .transpose(0, 1)
            .contiguous()
            .to(k.scalar_type());
      };
      return {.dq = ds.matmul(ByHead(k, heads)).transpose(0, 1).contiguous().to(q.scalar_type()),
              .dk = to_kv(ds.transpose(1, 2).matmul(ByHead(q, heads))),
              .dv = to_kv(p.transpose(1, 2).matmul(upstream))};
    }
  };

  // [n, h, d] -> [heads, n, d] fp32
  static torch::Tensor ByHead(const torch::Tensor& x, int64_t heads) {
    return x.to(torch::kFloat).transpose(0, 1).repeat_interleave(heads / x.size(1), 0);
  }
  static torch::Tensor Logits(const torch::Tensor& q, const torch::Tensor& k) {
    const int64_t n = q.size(0), heads = q.size(1);
    const torch::Tensor ahead =
        torch::ones({n, n}, q.options().dtype(torch::kBool)).triu(/*diagonal=*/1);
    return ByHead(q, heads)
        .matmul(ByHead(k, heads).transpose(1, 2))
        .div(std::sqrt(static_cast<double>(q.size(2))))
        .masked_fill(ahead, -std::numeric_limits<float>::infinity());
  }
};

}  // namespace ringleader::model
