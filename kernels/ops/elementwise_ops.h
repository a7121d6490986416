// The element-wise and row-wise steps of a decoder layer on the GPU: first as plain functions that
// write into tensors of the caller's, which the decoder calls, then as differentiable operators.
// bf16 CUDA tensors, last dimension dense; what does not fit surfaces as c10::Error.
#pragma once

#include <torch/types.h>

#include <tuple>

#include "kernels/ops/cast_ops.h"

namespace ringleader::kernels::ops {

struct NormRows {
  torch::Tensor y;     // [n, hidden]; undefined unless it is wanted
  torch::Tensor rstd;  // [n, 1] fp32, 1 / rms of what was normalised
};
// Normalises x: [n, hidden] or, with a residual, x + residual, which it then writes to `sum`. `sum`
// may be the residual; without a residual both are undefined. `cast`, where defined, receives y;
// then y itself may not be wanted.
NormRows NormForward(const torch::Tensor& x, const torch::Tensor& residual,
                     const torch::Tensor& weight, double epsilon, const torch::Tensor& sum,
                     const CastTensors& cast = {}, bool want_y = true);
// dx: [n, hidden], which may be dy, = the gradient of what was normalised (`sum`), plus d_sum,
// which reaches it past the norm (may be undefined). Adds to d_weight: [hidden] fp32. `cast`, where
// defined, receives dx.
void NormBackward(const torch::Tensor& dy, const torch::Tensor& sum, const torch::Tensor& rstd,
                  const torch::Tensor& weight, const torch::Tensor& d_sum, const torch::Tensor& dx,
                  const torch::Tensor& d_weight, const CastTensors& cast = {});

// gate_up: [n, 2 inner] -> silu(gate) * up: [n, inner]; cast and want_out as cast and want_y above.
torch::Tensor SwiGluForward(const torch::Tensor& gate_up, const CastTensors& cast = {},
                            bool want_out = true);
// activation: [n, inner], forward's result again; d_gate_up: [n, 2 inner]. Every element is read
// before its results are written: the results may be the inputs. `cast` and `activation_cast`, both
// defined or none, receive d_gate_up and activation; then these two may be undefined, both.
void SwiGluBackward(const torch::Tensor& d_activation, const torch::Tensor& gate_up,
                    const torch::Tensor& activation, const torch::Tensor& d_gate_up,
                    const CastTensors& cast = {}, const CastTensors& activation_cast = {});

// Rotates q: [n, heads, d] and k: [n, kv_heads, d] into outputs of their shapes, which may be the
// inputs, by positions: [n] int64 and inv_freq: [d / 2] fp32. `inverse` rotates back: the gradient.
void Rotate(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& positions,
            const torch::Tensor& inv_freq, double scale, bool inverse, const torch::Tensor& q_out,
            const torch::Tensor& k_out);

// The gradients of rotated q and k, and of v, rotated back and side by side: [n, (heads + 2
// kv_heads) d], into `out`, which may be undefined, and into `cast`. positions, inv_freq and scale
// as above.
void RotateBack(const torch::Tensor& dq, const torch::Tensor& dk, const torch::Tensor& dv,
                const torch::Tensor& positions, const torch::Tensor& inv_freq, double scale,
                const torch::Tensor& out, const CastTensors& cast);

// logits: [n, vocabulary], rows may be padded -> losses: [n] fp32, 0 where the label is
// fused::kIgnoredLabel. With `gradient`, the gradient of the losses' sum takes the logits' place.
torch::Tensor CrossEntropy(const torch::Tensor& logits, const torch::Tensor& labels, bool gradient);

// What follows is differentiable.

// y = x / rms(x) * weight; x: [n, hidden].
torch::Tensor RmsNorm(const torch::Tensor& x, const torch::Tensor& weight, double epsilon);
// (y, h): h = x + residual, y = RmsNorm(h).
std::tuple<torch::Tensor, torch::Tensor> AddRmsNorm(const torch::Tensor& x,
                                                    const torch::Tensor& residual,
                                                    const torch::Tensor& weight, double epsilon);
torch::Tensor SwiGlu(const torch::Tensor& gate_up);
// New tensors; q and k stay.
std::tuple<torch::Tensor, torch::Tensor> Rope(const torch::Tensor& q, const torch::Tensor& k,
                                              const torch::Tensor& positions,
                                              const torch::Tensor& inv_freq, double scale);

// The summed cross entropy of softmax(hidden head^T): an fp64 scalar whose gradient is computed in
// the same pass, a chunk of logits at a time. hidden: [n, hidden_size], head: [vocab, hidden_size],
// labels: [n] int64. Backward may only scale it.
torch::Tensor LinearCrossEntropySum(const torch::Tensor& hidden, const torch::Tensor& head,
                                    const torch::Tensor& labels, int64_t ignore_label);

}  // namespace ringleader::kernels::ops
