#include "kernels/reference/math/row_math_impl.h"
#include "kernels/reference/math/tile_math_impl.h"

namespace ringleader::kernels::reference::internal {

const TileMath& GenericTileMath() {
  static constexpr TileMath kMath = MakeTileMath("generic");
  return kMath;
}

const RowMath& GenericRowMath() {
  static constexpr RowMath kMath = MakeRowMath();
  return kMath;
}

}  // namespace ringleader::kernels::reference::internal
