#include "kernels/reference/math/row_math_impl.h"
#include "kernels/reference/math/tile_math_impl.h"

namespace ringleader::kernels::reference::internal {

const TileMath& Avx2TileMath() {
  static constexpr TileMath kMath = MakeTileMath("avx2");
  return kMath;
}

const RowMath& Avx2RowMath() {
  static constexpr RowMath kMath = MakeRowMath();
  return kMath;
}

}  // namespace ringleader::kernels::reference::internal
