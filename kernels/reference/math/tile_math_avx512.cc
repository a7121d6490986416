#include "kernels/reference/math/row_math_impl.h"
#include "kernels/reference/math/tile_math_impl.h"

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
