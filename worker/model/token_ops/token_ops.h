// The token-wise steps of a decoder layer and their gradients, outside autograd: the seam between
// the decoder and a device's fused passes, in fp32 on the CPU (cpu_token_ops.h) and in bf16 on a
// GPU (cuda_token_ops.h).
#pragma once

#include <torch/types.h>

#include <cstdint>

#include "base/labels.h"

namespace ringleader::model {

using ringleader::kIgnoreLabel;

// What a model says of tokens.
struct TokenScores {
  torch::Tensor losses;  // [n] fp32, the cross entropy of the label; 0 without one
  torch::Tensor right;   // [n] bool: the label's logit is larger than every other
};

// Angles are position * inverse_frequency, in fp32.
struct Rotary {
  torch::Tensor positions;            // [n] int64
  torch::Tensor inverse_frequencies;  // [head_dim / 2] fp32
  double scale = 1.0;                 // of cosines and sines
  // [n, head_dim / 2] fp32, scaled; where the device looks them up (PrepareRotary).
  torch::Tensor cos = {}, sin = {};
};

// A matrix in e4m3: x[i, j] ~ codes[i, j] * scales[i], where the scale is a power of two
// (kernels/e4m3.h). Undefined where it was not asked for.
struct ScaledRows {
  torch::Tensor codes;   // [n, k] Float8_e4m3fn, dense
  torch::Tensor scales;  // [n, 1] fp32
  bool defined() const { return codes.defined(); }
};

// What a product reads: a matrix in the model's type, in e4m3, or both.
struct Operand {
  torch::Tensor values;  // [n, k]
  ScaledRows rows;       // of values as they are stored in the model's type
};
// Which of the two a step gives.
enum class Form { kValues, kRows, kBoth };

// One call at a time; tensors are dense, of the model's type T unless stated. What does not fit
// surfaces as c10::Error.
class TokenOps {
 public:
  virtual ~TokenOps() = default;

  struct Norm {
    torch::Tensor sum;   // [n, hidden], what was normalised: x, or x + residual
    Operand y;           // [n, hidden]
    torch::Tensor rstd;  // [n, 1] fp32, 1 / rms(sum)
  };
  // y = sum / rms(sum) * weight. `residual` may be undefined; its memory may become sum's.
  virtual Norm NormForward(const torch::Tensor& x, const torch::Tensor& residual,
                           const torch::Tensor& weight, double epsilon, Form form) const = 0;
  // The gradient of sum, plus `d_sum`, which reaches it past the norm (may be undefined). Adds to
  // d_weight: [hidden] fp32. The memory of dy may become the result's. form: kValues or kBoth.
  virtual Operand NormBackward(const torch::Tensor& dy, const torch::Tensor& sum,
                               const torch::Tensor& rstd, const torch::Tensor& weight,
                               const torch::Tensor& d_sum, const torch::Tensor& d_weight,
                               Form form) const = 0;

  // Adds what the device computes ahead of all rotations. Called once for a sequence, before its
  // layers.
  virtual void PrepareRotary(Rotary& /*rotary*/) const {}
  // q: [n, heads, d], k: [n, kv_heads, d] into outputs of the same shapes, which may be the inputs;
  // strided by token. `inverse` rotates back: the gradient.
  virtual void Rotate(const torch::Tensor& q, const torch::Tensor& k, const Rotary& rotary,
                      bool inverse, const torch::Tensor& q_out,
                      const torch::Tensor& k_out) const = 0;

  // The gradients of rotated q and k, rotated back, and of v beside them: [n, (heads + 2 kv_heads)
  // d]. dq: [n, heads, d], dk, dv: [n, kv_heads, d]. `room`, dense and of the result's size, may
  // become its values, or anything.
  virtual Operand RotateBack(const torch::Tensor& dq, const torch::Tensor& dk,
                             const torch::Tensor& dv, const Rotary& rotary,
                             const torch::Tensor& room, Form form) const {
    const int64_t n = dq.size(0), heads = dq.size(1), kv_heads = dk.size(1), d = dq.size(2);
    const auto parts = room.view({n, heads + 2 * kv_heads, d})
                           .split_with_sizes({heads, kv_heads, kv_heads}, /*dim=*/1);
    Rotate(dq, dk, rotary, /*inverse=*/true, parts[0], parts[1]);
    parts[2].copy_(dv);
    return InForm(room.view({n, (heads + 2 * kv_heads) * d}), form);
  }

  // gate_up: [n, 2 inner] -> silu(gate) * up: [n, inner].
  virtual Operand SwiGlu(const torch::Tensor& gate_up, Form form) const = 0;
  struct SwiGluGradient {
    Operand activation;  // [n, inner], forward's result again
    Operand d_gate_up;   // [n, 2 inner]
  };
  // May use the memory of its inputs for the results, or leave anything there.
  virtual SwiGluGradient SwiGluBackward(const torch::Tensor& d_activation,
                                        const torch::Tensor& gate_up, Form form) const = 0;

  // x: [n, k] of the model's type.
  virtual ScaledRows CastRows(const torch::Tensor& x) const = 0;
  // The cast turned: codes [k, n], all in units of the largest scale of the rows, which are rounded
  // once more where that leaves less than e4m3 has bits for (kernels/fused/cast.h, TurnCodes).
  // scales: [1, 1]. A GPU pads n with zeros to a multiple of 16.
  virtual ScaledRows TurnRows(const ScaledRows& rows) const = 0;
  // y: [n, out] = a b^T (+ bias: [out]), summed in fp32. a: [n, k], b: [out, k], which may have one
  // scale for all; k and out are multiples of 16 on a GPU.
  virtual void ScaledProduct(const ScaledRows& a, const ScaledRows& b, const torch::Tensor& bias,
                             torch::Tensor y) const = 0;

  // d_weight: [out, in] fp32 += dy^T x; dy: [n, out], x: [n, in].
  virtual void AddWeightGradient(const torch::Tensor& dy, const torch::Tensor& x,
                                 const torch::Tensor& d_weight) const = 0;
  // The same of casts, as TurnRows makes them: the sum runs across rows.
  virtual void AddScaledWeightGradient(const ScaledRows& dy, const ScaledRows& x,
                                       const torch::Tensor& d_weight) const = 0;

  // logits: [n, vocab] -> losses: [n] fp32, 0 where the label is kIgnoreLabel. The logits may be
  // lost: with `gradient`, the losses' sum's gradient takes their place. Rows may be padded: stride
  // 0 >= vocab.
  virtual torch::Tensor CrossEntropy(const torch::Tensor& logits, const torch::Tensor& labels,
                                     bool gradient) const = 0;

  // d_table: [vocab, hidden] fp32; row tokens[i] += dx[i], in the order of i: the same bits every
  // time.
  virtual void AddEmbeddingGradient(const torch::Tensor& dx, const torch::Tensor& tokens,
                                    const torch::Tensor& d_table) const = 0;

 protected:
  // The form of an operand on devices that cast in a pass of its own.
  Operand InForm(const torch::Tensor& values, Form form) const {
    return {.values = form == Form::kRows ? torch::Tensor() : values,
            .rows = form == Form::kValues ? ScaledRows{} : CastRows(values)};
  }
};

}  // namespace ringleader::model
