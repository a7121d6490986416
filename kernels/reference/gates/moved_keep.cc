#include "kernels/reference/gates/moved_keep.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace ringleader::kernels::reference {

int64_t MovedKeep(int64_t keep, int64_t candidates, const ChoiceMove& move, uint32_t place) {
  return std::clamp<int64_t>(MovedCount(keep + 1, *move.factor, place) - 1, 0, candidates);
}

int64_t HeldKeep(std::vector<int64_t> masses, int64_t keep, int64_t moved, int64_t own_mass,
                 float tolerance) {
  if (moved >= keep) return moved;
  std::ranges::sort(masses, std::greater<>());
  const int64_t total = std::accumulate(masses.begin(), masses.end(), own_mass);
  const int64_t kept = std::accumulate(masses.begin(), masses.begin() + keep, int64_t{0});
  const int64_t held = HeldMass(kept, total, tolerance);
  int64_t mass = std::accumulate(masses.begin(), masses.begin() + moved, int64_t{0});
  int64_t count = moved;
  while (mass < held && count < keep) mass += masses[count++];
  return count;
}

}  // namespace ringleader::kernels::reference
