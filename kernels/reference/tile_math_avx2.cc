#include "kernels/reference/tile_math_impl.h"

namespace ringleader::kernels::reference::internal {

const TileMath& Avx2TileMath() {
  static constexpr TileMath kMath = MakeTileMath("avx2");
  return kMath;
}

}  // namespace ringleader::kernels::reference::internal
