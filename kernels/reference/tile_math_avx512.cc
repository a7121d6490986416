#include "kernels/reference/row_math_impl.h"
#include "kernels/reference/tile_math_impl.h"

namespace ringleader::kernels::reference::internal {

const TileMath& Avx512TileMath() {
  static constexpr TileMath kMath = MakeTileMath("avx512");
  return kMath;
}

const RowMath& Avx512RowMath() {
  static constexpr RowMath kMath = MakeRowMath();
  return kMath;
}

}  // namespace ringleader::kernels::reference::internal
