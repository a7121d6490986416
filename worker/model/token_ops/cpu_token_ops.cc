#include "worker/model/token_ops/cpu_token_ops.h"

#include <algorithm>

#include "base/numbers/ceil_div.h"
#include "kernels/ops/token_view.h"
#include "kernels/reference/math/fused.h"
#include "kernels/reference/math/thread_pool.h"

namespace ringleader::model {
namespace {

namespace reference = kernels::reference;
using kernels::ops::TokenView;
using torch::Tensor;

// Rows that a thread takes at a time. Sums over rows are taken block by block, so that their order
// is always the same.
constexpr int64_t kBlockRows = 256;

int64_t Blocks(int64_t rows) {
  return CeilDiv(rows, kBlockRows);
}

// body(block, first row, rows) for all of [0, rows).
template <typename Body>
void ForBlocks(reference::ThreadPool& pool, int64_t rows, const Body& body) {
  pool.For(Blocks(rows), [&](int64_t block, int /*worker*/) {
    const int64_t first = block * kBlockRows;
    body(block, first, std::min(kBlockRows, rows - first));
  });
}

void CheckRows(const Tensor& x, const char* name) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == torch::kFloat && x.is_cpu(),
              name, " must be a dense fp32 matrix on the CPU, it is ", x.toString(), " of ",
              x.sizes(), " with strides ", x.strides());
}

// Scales are powers of two: taking them in first rounds nothing.
Tensor Decoded(const ScaledRows& rows) {
  return rows.codes.to(torch::kFloat).mul_(rows.scales);
}

// Matrix products and what else LibTorch computes run on LibTorch's threads; the rest on the pool.
class CpuTokenOps : public TokenOps {
 public:
  explicit CpuTokenOps(int threads) : pool_(threads) {}

  Norm NormForward(const Tensor& x, const Tensor& residual, const Tensor& weight, double epsilon,
                   Form form) const override {
    CheckRows(x, "NormForward: x");
    if (residual.defined()) {
      CheckRows(residual, "NormForward: residual");
      residual.add_(x);
    }
    const int64_t dim = x.size(1);
    const Tensor normed = torch::empty_like(x);
    Norm norm{.sum = residual.defined() ? residual : x,
              .y = {},
              .rstd = torch::empty({x.size(0), 1}, x.options())};
    const float* const sum = norm.sum.const_data_ptr<float>();
    float* const y = normed.mutable_data_ptr<float>();
    float* const rstd = norm.rstd.mutable_data_ptr<float>();
    ForBlocks(pool_, x.size(0), [&](int64_t /*block*/, int64_t first, int64_t count) {
      reference::RmsNormForward({.x = sum + first * dim,
                                 .weight = weight.const_data_ptr<float>(),
                                 .y = y + first * dim,
                                 .rstd = rstd + first,
                                 .rows = count,
                                 .dim = dim,
                                 .epsilon = static_cast<float>(epsilon)});
    });
    norm.y = InForm(normed, form);
    return norm;
  }

  Operand NormBackward(const Tensor& dy, const Tensor& sum, const Tensor& rstd,
                       const Tensor& weight, const Tensor& d_sum, const Tensor& d_weight,
                       Form form) const override {
    CheckRows(dy, "NormBackward: dy");
    CheckRows(sum, "NormBackward: sum");
    const int64_t rows = sum.size(0), dim = sum.size(1);
    const Tensor partial = torch::zeros({Blocks(rows), dim}, sum.options());
    const float* const x = sum.const_data_ptr<float>();
    float* const dx = dy.mutable_data_ptr<float>();
    float* const dw = partial.mutable_data_ptr<float>();
    ForBlocks(pool_, rows, [&](int64_t block, int64_t first, int64_t count) {
      reference::RmsNormBackward({.x = x + first * dim,
                                  .weight = weight.const_data_ptr<float>(),
                                  .rstd = rstd.const_data_ptr<float>() + first,
                                  .dy = dx + first * dim,
                                  .dx = dx + first * dim,
                                  .d_weight = dw + block * dim,
                                  .rows = count,
                                  .dim = dim});
    });
    d_weight.add_(partial.sum(0));
    if (d_sum.defined()) dy.add_(d_sum);
    return InForm(dy, form);
  }

  // Angles in fp32, as models are trained and run elsewhere: fp64 would turn far positions by other
  // amounts.
  void PrepareRotary(Rotary& rotary) const override {
    const Tensor angles =
        rotary.positions.to(torch::kFloat).unsqueeze(1) * rotary.inverse_frequencies;
    rotary.cos = angles.cos().mul_(rotary.scale);
    rotary.sin = angles.sin().mul_(rotary.scale);
  }

  void Rotate(const Tensor& q, const Tensor& k, const Rotary& rotary, bool inverse,
              const Tensor& q_out, const Tensor& k_out) const override {
    TORCH_CHECK(rotary.cos.defined(), "Rotate: PrepareRotary comes first");
    for (const Tensor& x : {q, k, q_out, k_out}) {
      TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1, "Rotate: heads must be dense, strides are ",
                  x.strides());
    }
    const int64_t half = rotary.cos.size(1);
    const float* const cos = rotary.cos.const_data_ptr<float>();
    const float* const sin = rotary.sin.const_data_ptr<float>();
    ForBlocks(pool_, q.size(0), [&](int64_t /*block*/, int64_t first, int64_t count) {
      for (const auto& [x, out] : {std::pair(&q, &q_out), std::pair(&k, &k_out)}) {
        const Tensor from = x->narrow(0, first, count), to = out->narrow(0, first, count);
        reference::Rope({.x = TokenView(from, from.const_data_ptr<float>()),
                         .out = TokenView(to, to.mutable_data_ptr<float>()),
                         .cos = cos + first * half,
                         .sin = sin + first * half,
                         .inverse = inverse});
      }
    });
  }

  Operand SwiGlu(const Tensor& gate_up, Form form) const override {
    CheckRows(gate_up, "SwiGlu: gate_up");
    const int64_t inner = gate_up.size(1) / 2;
    Tensor result = torch::empty({gate_up.size(0), inner}, gate_up.options());
    const float* const gate = gate_up.const_data_ptr<float>();
    float* const out = result.mutable_data_ptr<float>();
    ForBlocks(pool_, gate_up.size(0), [&](int64_t /*block*/, int64_t first, int64_t count) {
      reference::SwigluForward({.gate = gate + first * 2 * inner,
                                .up = gate + first * 2 * inner + inner,
                                .out = out + first * inner,
                                .stride = 2 * inner,
                                .rows = count,
                                .dim = inner});
    });
    return InForm(result, form);
  }

  SwiGluGradient SwiGluBackward(const Tensor& d_activation, const Tensor& gate_up,
                                Form form) const override {
    CheckRows(d_activation, "SwiGluBackward: d_activation");
    CheckRows(gate_up, "SwiGluBackward: gate_up");
    const int64_t inner = d_activation.size(1);
    float* const gate = gate_up.mutable_data_ptr<float>();
    float* const d_out = d_activation.mutable_data_ptr<float>();
    // This may run in place: every element is read before its results are written.
    ForBlocks(pool_, gate_up.size(0), [&](int64_t /*block*/, int64_t first, int64_t count) {
      float* const row = gate + first * 2 * inner;
      reference::SwigluBackward({.gate = row,
                                 .up = row + inner,
                                 .d_out = d_out + first * inner,
                                 .d_gate = row,
                                 .d_up = row + inner,
                                 .out = d_out + first * inner,
                                 .stride = 2 * inner,
                                 .rows = count,
                                 .dim = inner});
    });
    return {.activation = InForm(d_activation, form), .d_gate_up = InForm(gate_up, form)};
  }

  ScaledRows CastRows(const Tensor& x) const override {
    TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "CastRows: rows must be dense, strides are ",
                x.strides());
    const int64_t dim = x.size(1);
    const ScaledRows rows{
        .codes = torch::empty({x.size(0), dim}, x.options().dtype(torch::kFloat8_e4m3fn)),
        .scales = torch::empty({x.size(0), 1}, x.options())};
    const float* const from = x.const_data_ptr<float>();
    auto* const codes = static_cast<uint8_t*>(rows.codes.mutable_data_ptr());
    float* const scales = rows.scales.mutable_data_ptr<float>();
    ForBlocks(pool_, x.size(0), [&](int64_t /*block*/, int64_t first, int64_t count) {
      reference::CastRows({.x = from + first * x.stride(0),
                           .codes = codes + first * dim,
                           .scales = scales + first,
                           .stride = x.stride(0),
                           .rows = count,
                           .dim = dim});
    });
    return rows;
  }

  ScaledRows TurnRows(const ScaledRows& rows) const override {
    const Tensor scale = rows.scales.max().view({1, 1});  // NaN where one is
    const Tensor values = rows.codes.to(torch::kFloat).mul_(rows.scales / scale);
    return {.codes = values.t().to(torch::kFloat8_e4m3fn).contiguous(), .scales = scale};
  }

  void ScaledProduct(const ScaledRows& a, const ScaledRows& b, const Tensor& bias,
                     Tensor y) const override {
    if (bias.defined()) {
      at::addmm_out(y, bias, Decoded(a), Decoded(b).t());
    } else {
      at::mm_out(y, Decoded(a), Decoded(b).t());
    }
  }

  void AddWeightGradient(const Tensor& dy, const Tensor& x, const Tensor& d_weight) const override {
    d_weight.addmm_(dy.t(), x);
  }

  void AddScaledWeightGradient(const ScaledRows& dy, const ScaledRows& x,
                               const Tensor& d_weight) const override {
    d_weight.addmm_(Decoded(TurnRows(dy)), Decoded(TurnRows(x)).t());
  }

  Tensor CrossEntropy(const Tensor& logits, const Tensor& labels, bool gradient) const override {
    const Tensor kept = labels.ne(kIgnoreLabel).unsqueeze(1);        // [n, 1]
    const Tensor index = labels.unsqueeze(1).masked_fill(~kept, 0);  // [n, 1]
    // All in the logits' own memory, for there is no other tensor of a vocabulary's size.
    Tensor p = logits;
    p.sub_(p.amax(1, /*keepdim=*/true));
    const Tensor wanted = p.gather(1, index);
    const Tensor sums = p.exp_().sum(1, /*keepdim=*/true);
    // Filled, not multiplied: a row that does not count must not spread a NaN either.
    Tensor losses = sums.log().sub_(wanted).masked_fill_(~kept, 0.0).squeeze(1);
    if (gradient) {  // softmax - one_hot(label)
      p.div_(sums);
      p.scatter_add_(1, index, torch::full_like(index, -1.0, p.options()));
      p.masked_fill_(~kept, 0.0);
    }
    return losses;
  }

  void AddEmbeddingGradient(const Tensor& dx, const Tensor& tokens,
                            const Tensor& d_table) const override {
    CheckRows(dx, "AddEmbeddingGradient: dx");
    CheckRows(d_table, "AddEmbeddingGradient: d_table");
    // A thread adds up columns of its own, so that none waits for another's rows.
    constexpr int64_t kColumns = 64;
    const int64_t dim = dx.size(1);
    pool_.For(CeilDiv(dim, kColumns), [&](int64_t block, int /*worker*/) {
      const int64_t first = block * kColumns;
      reference::EmbeddingBackward({.dx = dx.const_data_ptr<float>() + first,
                                    .tokens = tokens.const_data_ptr<int64_t>(),
                                    .table = d_table.mutable_data_ptr<float>() + first,
                                    .rows = dx.size(0),
                                    .dim = std::min(kColumns, dim - first),
                                    .stride = dim});
    });
  }

 private:
  mutable reference::ThreadPool pool_;
};

}  // namespace

std::unique_ptr<TokenOps> NewCpuTokenOps(int threads) {
  return std::make_unique<CpuTokenOps>(threads);
}

}  // namespace ringleader::model
