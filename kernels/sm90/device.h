// The device that these kernels run on.
#pragma once

#include "absl/status/statusor.h"

namespace ringleader::kernels::sm90 {

// Multiprocessors of the current device; FAILED_PRECONDITION unless it is a Hopper.
absl::StatusOr<int> MultiprocessorCount();

}  // namespace ringleader::kernels::sm90
