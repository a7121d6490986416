// TileMath for one instruction set: included by tile_math_*.cc, each compiled with its own flags.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/reference/math/simd.h"
#include "kernels/reference/math/tile_math.h"

namespace ringleader::kernels::reference {
namespace {

// Rows of the register block: 12 x 2 accumulators of 32 registers, 6 x 2 of 16.
constexpr int kRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;
constexpr int kPanel = 2 * kLanes;

// R rows of c, one panel wide. One stride of a is 1, known to the compiler, so that it becomes part
// of addresses: the loop has as many loads as it has operands, and broadcasts cost no more than
// loads, which leaves both arithmetic ports to the multiplications.
template <int R, bool kTransposed>
[[gnu::always_inline]] inline void Block(int k, const float* a, int64_t a_stride, const float* b,
                                         float* c, int64_t c_row, bool accumulate) {
  Vec acc[R][2];
  if (accumulate) {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      acc[i][0] = Load(c + i * c_row);
      acc[i][1] = Load(c + i * c_row + kLanes);
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) acc[i][0] = acc[i][1] = Vec{};
  }
  for (int kk = 0; kk < k; ++kk) {
    const Vec b0 = Load(b), b1 = Load(b + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const Vec x = Splat(a[kTransposed ? i : i * a_stride]);
      acc[i][0] += x * b0;
      acc[i][1] += x * b1;
    }
    a += kTransposed ? a_stride : 1;
    b += kPanel;
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    Store(c + i * c_row, acc[i][0]);
    Store(c + i * c_row + kLanes, acc[i][1]);
  }
}

// R rows at a time from row i on; returns the first row left.
template <int R, bool kTransposed>
[[gnu::noinline]] int Rows(int i, int m, int k, const float* a, int64_t a_stride, const float* b,
                           float* c, int64_t c_row, bool accumulate) {
  for (; i + R <= m; i += R) {
    Block<R, kTransposed>(k, a + i * (kTransposed ? 1 : a_stride), a_stride, b, c + i * c_row,
                          c_row, accumulate);
  }
  return i;
}

template <bool kTransposed>
void GemmOf(int m, int n, int k, const float* a, int64_t a_stride, const float* b,
            int64_t b_panel_stride, float* c, int64_t c_row, bool accumulate) {
  for (int j = 0; j < n; j += kPanel, b += b_panel_stride, c += kPanel) {
    int i = Rows<kRows, kTransposed>(0, m, k, a, a_stride, b, c, c_row, accumulate);
    if constexpr (kRows > 8) {
      i = Rows<8, kTransposed>(i, m, k, a, a_stride, b, c, c_row, accumulate);
    }
    if constexpr (kRows > 4) {
      i = Rows<4, kTransposed>(i, m, k, a, a_stride, b, c, c_row, accumulate);
    }
    Rows<1, kTransposed>(i, m, k, a, a_stride, b, c, c_row, accumulate);
  }
}

void Gemm(int m, int n, int k, const float* a, int64_t a_row, int64_t a_column, const float* b,
          int64_t b_panel_stride, float* c, int64_t c_row, bool accumulate) {
  if (a_row == 1) {
    GemmOf<true>(m, n, k, a, a_column, b, b_panel_stride, c, c_row, accumulate);
  } else {
    GemmOf<false>(m, n, k, a, a_row, b, b_panel_stride, c, c_row, accumulate);
  }
}

void Softmax(int rows, int columns, float* s, int64_t s_row, float* maximum, float* sum, float* out,
             int64_t out_columns) {
  constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
  for (int i = 0; i < rows; ++i, s += s_row, out += out_columns) {
    Vec top0 = Load(s), top1 = Load(s + kLanes);
    for (int j = kPanel; j < columns; j += kPanel) {
      top0 = Max(top0, Load(s + j));
      top1 = Max(top1, Load(s + j + kLanes));
    }
    const float old_maximum = maximum[i];
    const float new_maximum = Max(old_maximum, MaxOf(Max(top0, top1)));
    // A row that has seen no key yet stays so: shifting by zero turns its -infinities into zeros.
    const Vec shift = Splat(new_maximum == kNegativeInfinity ? 0.0f : new_maximum);
    Vec sum0 = {}, sum1 = {};
    for (int j = 0; j < columns; j += kPanel) {
      const Vec p0 = Exp2(Load(s + j) - shift), p1 = Exp2(Load(s + j + kLanes) - shift);
      Store(s + j, p0);
      Store(s + j + kLanes, p1);
      sum0 += p0;
      sum1 += p1;
    }
    const float row_sum = SumOf(sum0 + sum1);
    if (new_maximum == old_maximum) {
      sum[i] += row_sum;
      continue;
    }
    const float rescale =
        old_maximum == kNegativeInfinity ? 0.0f : std::exp2(old_maximum - new_maximum);
    sum[i] = sum[i] * rescale + row_sum;
    maximum[i] = new_maximum;
    const Vec factor = Splat(rescale);
    for (int64_t j = 0; j < out_columns; j += kPanel) {
      Store(out + j, Load(out + j) * factor);
      Store(out + j + kLanes, Load(out + j + kLanes) * factor);
    }
  }
}

void SoftmaxGradient(int rows, int columns, float* s, float* dp, int64_t row_stride,
                     const float* lse2, const float* delta) {
  for (int i = 0; i < rows; ++i, s += row_stride, dp += row_stride) {
    const Vec shift = Splat(lse2[i]), d = Splat(delta[i]);
    for (int j = 0; j < columns; j += kPanel) {
      const Vec p0 = Exp2(Load(s + j) - shift), p1 = Exp2(Load(s + j + kLanes) - shift);
      Store(s + j, p0);
      Store(s + j + kLanes, p1);
      Store(dp + j, p0 * (Load(dp + j) - d));
      Store(dp + j + kLanes, p1 * (Load(dp + j + kLanes) - d));
    }
  }
}

void Axpy(int64_t count, float factor, const float* x, float* y) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(y + i, Load(y + i) + factor * Load(x + i));
  for (; i < count; ++i) y[i] += factor * x[i];
}

void Exp2All(int64_t count, float shift, const float* x, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(out + i, Exp2(Load(x + i) - shift));
  if (i == count) return;
  // The tail goes through the same instructions, so that a value never depends on its place.
  float tail[kLanes] = {};
  std::memcpy(tail, x + i, (count - i) * sizeof(float));
  Store(tail, Exp2(Load(tail) - shift));
  std::memcpy(out + i, tail, (count - i) * sizeof(float));
}

void RowMaximum(int rows, int columns, const float* s, int64_t s_row, float* maximum) {
  for (int i = 0; i < rows; ++i, s += s_row) {
    Vec top0 = Load(s), top1 = Load(s + kLanes);
    for (int j = kPanel; j < columns; j += kPanel) {
      top0 = Max(top0, Load(s + j));
      top1 = Max(top1, Load(s + j + kLanes));
    }
    maximum[i] = Max(maximum[i], MaxOf(Max(top0, top1)));
  }
}

void Exp2RowSums(int rows, int columns, const float* s, int64_t s_row, const float* shift,
                 float* sums) {
  for (int i = 0; i < rows; ++i, s += s_row) {
    const Vec by = Splat(shift[i]);
    Vec sum0 = {}, sum1 = {};
    for (int j = 0; j < columns; j += kPanel) {
      sum0 += Exp2(Load(s + j) - by);
      sum1 += Exp2(Load(s + j + kLanes) - by);
    }
    sums[i] = SumOf(sum0 + sum1);
  }
}

void Exp2ColumnSums(int rows, int columns, const float* s, int64_t s_row, const float* shift,
                    float* sums) {
  for (int j = 0; j < columns; j += kPanel) {
    Vec sum0 = {}, sum1 = {};
    for (int i = 0; i < rows; ++i) {
      const Vec by = Splat(shift[i]);
      sum0 += Exp2(Load(s + i * s_row + j) - by);
      sum1 += Exp2(Load(s + i * s_row + j + kLanes) - by);
    }
    Store(sums + j, sum0);
    Store(sums + j + kLanes, sum1);
  }
}

constexpr TileMath MakeTileMath(const char* name) {
  return {.name = name,
          .panel = kPanel,
          .gemm = Gemm,
          .softmax = Softmax,
          .softmax_gradient = SoftmaxGradient,
          .axpy = Axpy,
          .exp2 = Exp2All,
          .row_maximum = RowMaximum,
          .exp2_row_sums = Exp2RowSums,
          .exp2_column_sums = Exp2ColumnSums};
}

}  // namespace
}  // namespace ringleader::kernels::reference
