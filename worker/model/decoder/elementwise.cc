#include "worker/model/decoder/elementwise.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels/reference/math/fused.h"

namespace ringleader::model {
namespace {

namespace reference = kernels::reference;

constexpr int64_t kRowsPerTask = 256;

// rows(first, count) for all of [0, total).
template <typename Rows>
void ForRows(int64_t total, Rows rows) {
  at::parallel_for(0, total, kRowsPerTask,
                   [&](int64_t begin, int64_t end) { rows(begin, end - begin); });
}

// [tokens, heads, d] as the kernels see it; the last dimension must be dense.
template <typename T>
kernels::TokenMajor<T> View(const torch::Tensor& x, T* data, int64_t first, int64_t count) {
  return {.data = data + first * x.stride(0),
          .tokens = count,
          .heads = static_cast<int32_t>(x.size(1)),
          .head_dim = static_cast<int32_t>(x.size(2)),
          .token_stride = x.stride(0),
          .head_stride = x.stride(1)};
}

}  // namespace

NormResult NormForward(const torch::Tensor& input, const torch::Tensor& weight, double epsilon) {
  const torch::Tensor x = input.contiguous();
  const int64_t n = x.size(0), dim = x.size(1);
  NormResult result{.y = torch::empty_like(x), .rstd = torch::empty({n, 1}, x.options())};
  const float *from = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  float *y = result.y.data_ptr<float>(), *rstd = result.rstd.data_ptr<float>();
  ForRows(n, [&](int64_t first, int64_t count) {
    reference::RmsNormForward({.x = from + first * dim,
                               .weight = w,
                               .y = y + first * dim,
                               .rstd = rstd + first,
                               .rows = count,
                               .dim = dim,
                               .epsilon = static_cast<float>(epsilon)});
  });
  return result;
}

torch::Tensor NormRecompute(const torch::Tensor& x, const torch::Tensor& rstd,
                            const torch::Tensor& weight) {
  return (x * rstd).mul_(weight);
}

NormGradient NormBackward(const torch::Tensor& upstream, const torch::Tensor& input,
                          const torch::Tensor& rstd, const torch::Tensor& weight) {
  const torch::Tensor x = input.contiguous(), dy = upstream.contiguous();
  const int64_t n = x.size(0), dim = x.size(1);
  // Blocks of fixed size sum dweight on their own, so that the order of additions is always the
  // same.
  const int64_t blocks = (n + kRowsPerTask - 1) / kRowsPerTask;
  const torch::Tensor partial = torch::zeros({blocks, dim}, x.options());
  NormGradient gradient{.dx = torch::empty_like(x), .dweight = {}};
  const float *from = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  const float *up = dy.const_data_ptr<float>(), *r = rstd.const_data_ptr<float>();
  float *dx = gradient.dx.data_ptr<float>(), *dw = partial.data_ptr<float>();
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kRowsPerTask;
      reference::RmsNormBackward({.x = from + first * dim,
                                  .weight = w,
                                  .rstd = r + first,
                                  .dy = up + first * dim,
                                  .dx = dx + first * dim,
                                  .d_weight = dw + block * dim,
                                  .rows = std::min(kRowsPerTask, n - first),
                                  .dim = dim});
    }
  });
  gradient.dweight = partial.sum(0);
  return gradient;
}

void Rotate(const torch::Tensor& input, const torch::Tensor& cos, const torch::Tensor& sin,
            bool inverse, torch::Tensor out) {
  const torch::Tensor x = input.stride(2) == 1 ? input : input.contiguous();
  const int64_t half = cos.size(1);
  const float* from = x.const_data_ptr<float>();
  const float *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  ForRows(x.size(0), [&](int64_t first, int64_t count) {
    reference::Rope({.x = View<const float>(x, from, first, count),
                     .out = View<float>(out, to, first, count),
                     .cos = c + first * half,
                     .sin = s + first * half,
                     .inverse = inverse});
  });
}

torch::Tensor SwiGlu(const torch::Tensor& gate_up) {
  const int64_t n = gate_up.size(0), inner = gate_up.size(1) / 2;
  torch::Tensor result = torch::empty({n, inner}, gate_up.options());
  const float* gate = gate_up.const_data_ptr<float>();
  float* out = result.data_ptr<float>();
  ForRows(n, [&](int64_t first, int64_t count) {
    reference::SwigluForward({.gate = gate + first * 2 * inner,
                              .up = gate + first * 2 * inner + inner,
                              .out = out + first * inner,
                              .stride = 2 * inner,
                              .rows = count,
                              .dim = inner});
  });
  return result;
}

SwiGluGradient SwiGluBackward(const torch::Tensor& dactivation, const torch::Tensor& gate_up) {
  const int64_t n = gate_up.size(0), inner = gate_up.size(1) / 2;
  SwiGluGradient result{.activation = torch::empty_like(dactivation),
                        .dgate_up = torch::empty_like(gate_up)};
  const float* gate = gate_up.const_data_ptr<float>();
  const float* upstream = dactivation.const_data_ptr<float>();
  float* out = result.activation.data_ptr<float>();
  float* d_gate = result.dgate_up.data_ptr<float>();
  ForRows(n, [&](int64_t first, int64_t count) {
    const int64_t row = first * 2 * inner;
    reference::SwigluBackward({.gate = gate + row,
                               .up = gate + row + inner,
                               .d_out = upstream + first * inner,
                               .d_gate = d_gate + row,
                               .d_up = d_gate + row + inner,
                               .out = out + first * inner,
                               .stride = 2 * inner,
                               .rows = count,
                               .dim = inner});
  });
  return result;
}

}  // namespace ringleader::model
