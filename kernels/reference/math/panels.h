// Copies rows of token-major tensors into the panels that TileMath reads.
#pragma once

#include <cstdint>

namespace ringleader::kernels::reference {

inline int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// rows[count, d], row i at rows + i * stride, to [count / panel][d][panel]: the transpose, so that
// tokens are columns. Tokens from `count` up to a whole panel are zero.
void PackTransposed(const float* rows, int64_t stride, int count, int d, int panel, float* out);

// rows[count, d] to [d / panel][count][panel]: features are columns, zero up to a whole panel.
void PackPanels(const float* rows, int64_t stride, int count, int d, int panel, float* out);

// rows[count, d] to [count][d], times factor.
void PackRows(const float* rows, int64_t stride, int count, int d, float factor, float* out);

}  // namespace ringleader::kernels::reference
