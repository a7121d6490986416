#include "kernels/reference/tile_math_impl.h"

namespace ringleader::kernels::reference::internal {

const TileMath& Avx512TileMath() {
  static constexpr TileMath kMath = MakeTileMath("avx512");
  return kMath;
}

}  // namespace ringleader::kernels::reference::internal
