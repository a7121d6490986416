// The arithmetic of one tile, compiled once for each instruction set and picked at run time.
//
// Right-hand matrices are packed in panels of `panel` columns, [columns / panel][k][panel], so that
// the inner loop reads them in order; missing columns are zero.
#pragma once

#include <cstdint>

namespace ringleader::kernels::reference {

struct TileMath {
  const char* name;
  int panel;

  // c[m, n] = or += a[m, k] b[k, n]; n a multiple of panel. a(i, k) = a[i * a_row + k * a_column],
  // where one of the strides is 1. Panels of b lie b_panel_stride elements apart. Each element of c
  // is summed over k in ascending order, whatever the shape.
  void (*gemm)(int m, int n, int k, const float* a, int64_t a_row, int64_t a_column, const float* b,
               int64_t b_panel_stride, float* c, int64_t c_row, bool accumulate);

  // One step of the online softmax, base 2. For each row of s[rows, columns] (columns a multiple of
  // panel, -infinity where masked): the running maximum and sum take the row in, s becomes
  // exp2(s - maximum), and the row of out[rows, out_columns] is rescaled to the new maximum.
  void (*softmax)(int rows, int columns, float* s, int64_t s_row, float* maximum, float* sum,
                  float* out, int64_t out_columns);

  // s[rows, columns] becomes p = exp2(s - lse2[row]), and dp becomes p * (dp - delta[row]).
  // lse2 = +infinity gives a row of zeros.
  void (*softmax_gradient)(int rows, int columns, float* s, float* dp, int64_t row_stride,
                           const float* lse2, const float* delta);

  // y[i] += factor * x[i]
  void (*axpy)(int64_t count, float factor, const float* x, float* y);

  // out[i] = exp2(x[i] - shift)
  void (*exp2)(int64_t count, float shift, const float* x, float* out);

  // Maxima and sums over s[rows, columns], columns a multiple of panel; the order of a sum depends
  // only on the shape:
  //   maximum[i] = max(maximum[i], s[i, :])
  //   sums[i] = sum over j of exp2(s[i, j] - shift[i])
  //   sums[j] = sum over i of exp2(s[i, j] - shift[i])
  void (*row_maximum)(int rows, int columns, const float* s, int64_t s_row, float* maximum);
  void (*exp2_row_sums)(int rows, int columns, const float* s, int64_t s_row, const float* shift,
                        float* sums);
  void (*exp2_column_sums)(int rows, int columns, const float* s, int64_t s_row, const float* shift,
                           float* sums);
};

// The fastest that this processor runs. RINGLEADER_CPU=avx512|avx2|generic in the environment asks
// for less.
const TileMath& BestTileMath();

// The arithmetic of this name, or null where this processor lacks it: for tests.
const TileMath* FindTileMath(const char* name);

namespace internal {
const TileMath& GenericTileMath();
#if defined(__x86_64__)
const TileMath& Avx2TileMath();
const TileMath& Avx512TileMath();
#endif
}  // namespace internal

}  // namespace ringleader::kernels::reference
