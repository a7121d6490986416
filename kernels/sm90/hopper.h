// Whether the kernels of this folder run on the current device.
#pragma once

#include "absl/status/status.h"

namespace ringleader::kernels::sm90 {

// FAILED_PRECONDITION unless the current device is a Hopper.
absl::Status CheckHopper();

}  // namespace ringleader::kernels::sm90
