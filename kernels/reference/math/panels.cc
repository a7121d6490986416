#include "kernels/reference/math/panels.h"

#include <algorithm>
#include <cstring>

namespace ringleader::kernels::reference {

void PackTransposed(const float* rows, int64_t stride, int count, int d, int panel, float* out) {
  for (int first = 0; first < count; first += panel) {
    const int columns = std::min(panel, count - first);
    // Four features at a time: each touches a quarter of the cache lines it writes.
    int k = 0;
    for (; k + 4 <= d; k += 4, out += 4 * panel) {
      const float* row = rows + first * stride + k;
      for (int j = 0; j < columns; ++j, row += stride) {
        for (int kk = 0; kk < 4; ++kk) out[kk * panel + j] = row[kk];
      }
      for (int kk = 0; kk < 4; ++kk) {
        std::fill(out + kk * panel + columns, out + (kk + 1) * panel, 0.0f);
      }
    }
    for (; k < d; ++k, out += panel) {
      const float* row = rows + first * stride + k;
      for (int j = 0; j < columns; ++j) out[j] = row[j * stride];
      std::fill(out + columns, out + panel, 0.0f);
    }
  }
}

void PackPanels(const float* rows, int64_t stride, int count, int d, int panel, float* out) {
  for (int first = 0; first < d; first += panel) {
    const int columns = std::min(panel, d - first);
    for (int i = 0; i < count; ++i, out += panel) {
      std::memcpy(out, rows + i * stride + first, columns * sizeof(float));
      std::fill(out + columns, out + panel, 0.0f);
    }
  }
}

void PackRows(const float* rows, int64_t stride, int count, int d, float factor, float* out) {
  for (int i = 0; i < count; ++i, out += d) {
    const float* row = rows + i * stride;
    for (int k = 0; k < d; ++k) out[k] = row[k] * factor;
  }
}

}  // namespace ringleader::kernels::reference
