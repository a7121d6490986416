// Times as messages to workers carry them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "absl/time/time.h"

namespace ringleader::lifecycle {

// At most 49 days, which is what the field holds: nobody waits for longer.
inline uint32_t WireMilliseconds(absl::Duration duration) {
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  return static_cast<uint32_t>(std::min(absl::ToInt64Milliseconds(duration), kMost));
}

}  // namespace ringleader::lifecycle
