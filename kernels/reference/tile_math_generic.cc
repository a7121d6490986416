#include "kernels/reference/tile_math_impl.h"

namespace ringleader::kernels::reference::internal {

const TileMath& GenericTileMath() {
  static constexpr TileMath kMath = MakeTileMath("generic");
  return kMath;
}

}  // namespace ringleader::kernels::reference::internal
