#include "worker/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ringleader::optim {

double LearningRateSchedule::At(int64_t step) const {
  if (step < warmup_steps) return peak * static_cast<double>(step + 1) / warmup_steps;
  const int64_t decay_steps = total_steps - 1 - warmup_steps;  // from the peak to the minimum
  if (decay == Decay::kConstant || decay_steps <= 0) return peak;
  const double done = std::min(1.0, static_cast<double>(step - warmup_steps) / decay_steps);
  const double kept =
      decay == Decay::kLinear ? 1.0 - done : 0.5 * (1.0 + std::cos(std::numbers::pi * done));
  return minimum + (peak - minimum) * kept;
}

}  // namespace ringleader::optim
