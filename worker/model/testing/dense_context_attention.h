// Softmax attention on one rank without autograd, written down by its definition: for tests of
// models whose heads the kernels do not take, and as what any mask is compared with.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <utility>

#include "worker/attention/runner/context_attention.h"

namespace ringleader::model {

class DenseContextAttention : public attention::ContextAttention {
 public:
  // Causal, in fp32 whatever q's type.
  DenseContextAttention() = default;
  // Query i sees key j where visible[i, j]; in `type`.
  DenseContextAttention(torch::Tensor visible, torch::ScalarType type)
      : view_{std::move(visible), type} {}

  attention::AttentionOutput Forward(int /*layer*/, const torch::Tensor& q, const torch::Tensor& k,
                                     const torch::Tensor& v) override {
    const torch::Tensor logits = view_.Logits(q, k);
    return {.out = logits.softmax(-1)
                       .matmul(view_.ByHead(v, q.size(1)))
                       .transpose(0, 1)
                       .contiguous()
                       .to(q.scalar_type()),
            .lse = logits.logsumexp(-1).to(torch::kFloat),
            .record = std::make_shared<Record>(view_)};
  }
  void SetDense(bool /*dense*/) override {}
  absl::Status SetDocuments(int64_t /*tokens*/, std::span<const int64_t> firsts,
                            int64_t /*padding*/, std::span<const int64_t>) override {
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
  struct View {
    torch::Tensor visible = {};  // [n, n]; undefined: causal
    torch::ScalarType type = torch::kFloat;

    // [n, h, d] -> [heads, n, d]
    torch::Tensor ByHead(const torch::Tensor& x, int64_t heads) const {
      return x.to(type).transpose(0, 1).repeat_interleave(heads / x.size(1), 0);
    }
    torch::Tensor Logits(const torch::Tensor& q, const torch::Tensor& k) const {
      const int64_t n = q.size(0), heads = q.size(1);
      const torch::Tensor hidden =
          visible.defined()
              ? visible.logical_not()
              : torch::ones({n, n}, q.options().dtype(torch::kBool)).triu(/*diagonal=*/1);
      return ByHead(q, heads)
          .matmul(ByHead(k, heads).transpose(1, 2))
          .div(std::sqrt(static_cast<double>(q.size(2))))
          .masked_fill(hidden, -std::numeric_limits<float>::infinity());
    }
  };

  class Record : public attention::AttentionRecord {
   public:
    explicit Record(View view) : view_(std::move(view)) {}
    attention::AttentionGradients Backward(const torch::Tensor& q, const torch::Tensor& k,
                                           const torch::Tensor& v, const torch::Tensor& out,
                                           const torch::Tensor& lse,
                                           const torch::Tensor& d_out) const override {
      const int64_t heads = q.size(1), kv_heads = k.size(1);
      const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(2)));
      const torch::Tensor p =
          (view_.Logits(q, k) - lse.unsqueeze(2).to(view_.type)).exp();  // [heads, n, n]
      const torch::Tensor upstream = view_.ByHead(d_out, heads);
      const torch::Tensor delta = (upstream * view_.ByHead(out, heads)).sum(-1, /*keepdim=*/true);
      const torch::Tensor ds =
          p * (upstream.matmul(view_.ByHead(v, heads).transpose(1, 2)) - delta) * scale;
      // [heads, n, d] -> [n, kv_heads, d], summed over a group's query heads.
      const auto to_kv = [&](const torch::Tensor& x) {
        return x.view({kv_heads, heads / kv_heads, x.size(1), x.size(2)})
            .sum(1)
            .transpose(0, 1)
            .contiguous()
            .to(k.scalar_type());
      };
      return {
          .dq = ds.matmul(view_.ByHead(k, heads)).transpose(0, 1).contiguous().to(q.scalar_type()),
          .dk = to_kv(ds.transpose(1, 2).matmul(view_.ByHead(q, heads))),
          .dv = to_kv(p.transpose(1, 2).matmul(upstream))};
    }

   private:
    const View view_;
  };

  const View view_ = {};
};

}  // namespace ringleader::model
