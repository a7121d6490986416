// Whether the kernels of this folder run on the current device.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringleader::kernels::sm90 {

// FAILED_PRECONDITION unless the current device is a Hopper.
absl::Status CheckHopper();

// Multiprocessors of the current device; FAILED_PRECONDITION unless it is a Hopper.
absl::StatusOr<int> MultiprocessorCount();

}  // namespace ringleader::kernels::sm90
