// What a job asks of attention.balance.
#pragma once

#include <cstdint>

#include "ringleader/kernels/balance_steps.h"

namespace ringleader::patterns {

// How choices are moved so that ranks and groups that wait for each other take equally long.
struct BalanceOptions {
  kernels::Anchor anchor = kernels::Anchor::kNone;
  float tolerance = 0.1f;  // of the estimated share of attention; 0: nothing is moved

  bool is_on() const { return anchor != kernels::Anchor::kNone && tolerance > 0.0f; }

  // Room for `count` elements of an unmoved choice once it is moved.
  int64_t RoomFor(int64_t count) const { return is_on() ? count + (count + 1) / 2 : count; }
};

}  // namespace ringleader::patterns
