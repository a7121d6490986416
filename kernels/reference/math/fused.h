// The row-wise steps of a decoder on the CPU, forward and backward, each one pass over memory:
// RMSNorm, rotary embedding, SwiGLU, the embedding's gradient, casts to e4m3. fp32; the contracts
// of kernels/fused/ on the GPU.
//
// Each call runs on the calling thread; callers split rows among threads. A row's result does not
// depend on how rows are split.
#pragma once

#include <cstdint>

#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::reference {

// y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + epsilon). y may be x.
struct RmsNormForwardArgs {
  const float* x = nullptr;       // [rows, dim]
  const float* weight = nullptr;  // [dim]
  float* y = nullptr;             // [rows, dim]
  float* rstd = nullptr;          // [rows]
  int64_t rows = 0;
  int64_t dim = 0;
  float epsilon = 1e-6f;
};
void RmsNormForward(const RmsNormForwardArgs& args);

// dx overwritten (may be dy), d_weight added to, row after row.
struct RmsNormBackwardArgs {
  const float* x = nullptr;       // [rows, dim], what was normalised
  const float* weight = nullptr;  // [dim]
  const float* rstd = nullptr;    // [rows]
  const float* dy = nullptr;      // [rows, dim]
  float* dx = nullptr;            // [rows, dim]
  float* d_weight = nullptr;      // [dim]
  int64_t rows = 0;
  int64_t dim = 0;
};
void RmsNormBackward(const RmsNormBackwardArgs& args);

// With c = cos[t, i], s = sin[t, i] (of position t times frequency i), D = head_dim:
//   out[i] = x[i] c - x[i + D/2] s;  out[i + D/2] = x[i + D/2] c + x[i] s
// `inverse` rotates back (s -> -s), which is the gradient. out may be x.
struct RopeArgs {
  TokenMajor<const float> x = {};  // [tokens, heads, head_dim], head_dim even
  TokenMajor<float> out = {};
  const float* cos = nullptr;  // [tokens, head_dim / 2]
  const float* sin = nullptr;
  bool inverse = false;
};
void Rope(const RopeArgs& args);

// out = silu(gate) * up. Rows of gate and up lie `stride` elements apart: halves of one product.
struct SwigluForwardArgs {
  const float* gate = nullptr;  // [rows, dim]
  const float* up = nullptr;
  float* out = nullptr;  // [rows, dim], dense
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t dim = 0;
};
void SwigluForward(const SwigluForwardArgs& args);

// d_gate and d_up, rows `stride` apart, may be gate and up. `out`, when set, receives the forward
// result again; it may be d_out.
struct SwigluBackwardArgs {
  const float* gate = nullptr;
  const float* up = nullptr;
  const float* d_out = nullptr;  // [rows, dim], dense
  float* d_gate = nullptr;
  float* d_up = nullptr;
  float* out = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t dim = 0;
};
void SwigluBackward(const SwigluBackwardArgs& args);

// Row tokens[i] of the table += dx[i], in the order of i. Rows of dx and of the table lie `stride`
// elements apart: callers split columns among threads.
struct EmbeddingBackwardArgs {
  const float* dx = nullptr;        // [rows, dim]
  const int64_t* tokens = nullptr;  // [rows], places in the table
  float* table = nullptr;           // [vocabulary, dim]
  int64_t rows = 0;
  int64_t dim = 0;
  int64_t stride = 0;
};
void EmbeddingBackward(const EmbeddingBackwardArgs& args);

// Returns the code of the e4m3 value that is nearest to x, ties to even; that of 448, the largest,
// for what is larger.
uint8_t ToE4m3(float x);
float FromE4m3(uint8_t code);

// x in e4m3, with the scale of each row: the codes of kernels/fused/cast.h.
struct CastRowsArgs {
  const float* x = nullptr;  // [rows, dim], rows `stride` elements apart
  uint8_t* codes = nullptr;  // [rows, dim], dense
  float* scales = nullptr;   // [rows], as E4m3ScaleOf has them
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t dim = 0;
};
void CastRows(const CastRowsArgs& args);

}  // namespace ringleader::kernels::reference
