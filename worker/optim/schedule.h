// Learning rate by step: linear warm-up, then constant, cosine or linear decay.
#pragma once

#include <cstdint>

namespace ringleader::optim {

struct LearningRateSchedule {
  enum class Decay { kConstant, kCosine, kLinear };

  Decay decay = Decay::kConstant;
  double peak = 0.0;
  double minimum = 0.0;      // reached at the last step (cosine, linear)
  int64_t warmup_steps = 0;  // step w - 1 of w is the first at the peak
  int64_t total_steps = 0;

  // step: 0-based. Steps past total_steps keep the last value.
  double At(int64_t step) const;
};

}  // namespace ringleader::optim
