#include "balance/length_densities.h"

#include <algorithm>

namespace ringleader::balance {
namespace {

// The last 32 observations decide.
constexpr double kNewest = 1.0 / 32;
constexpr int kFew = 4;
// Lengths of reports are rounded to few: nodes that send others are not listened to.
constexpr size_t kMostLengths = 64;

}  // namespace

void LengthDensities::Observe(uint64_t tokens, double density) {
  if (!(density > 0 && density <= 1)) return;
  if (averages_.size() >= kMostLengths && !averages_.contains(tokens)) return;
  Average& average = averages_[tokens];
  ++average.count;
  average.value += std::max(kNewest, 1.0 / average.count) * (density - average.value);
}

std::optional<double> LengthDensities::Of(uint64_t tokens) const {
  const auto found = averages_.find(tokens);
  if (found == averages_.end() || found->second.count < kFew) return std::nullopt;
  return found->second.value;
}

}  // namespace ringleader::balance
