#include "kernels/reference/math/tile_math.h"

#include <cstdlib>
#include <string>

namespace ringleader::kernels::reference {

const TileMath* FindTileMath(const char* name) {
  const std::string wanted = name;
#if defined(__x86_64__)
  if (wanted == "avx512" && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512dq")) {
    return &internal::Avx512TileMath();
  }
  if (wanted == "avx2" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return &internal::Avx2TileMath();
  }
#endif
  return wanted == "generic" ? &internal::GenericTileMath() : nullptr;
}

const TileMath& BestTileMath() {
  static const TileMath* const kBest = [] {
    if (const char* asked = std::getenv("RINGLEADER_CPU"); asked != nullptr) {
      if (const TileMath* math = FindTileMath(asked); math != nullptr) return math;
    }
    for (const char* name : {"avx512", "avx2"}) {
      if (const TileMath* math = FindTileMath(name); math != nullptr) return math;
    }
    return &internal::GenericTileMath();
  }();
  return *kBest;
}

}  // namespace ringleader::kernels::reference
