// Whether the kernels of this folder run on the current device.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringleader::kernels::sm90 {

// FAILED_PRECONDITION unless the current device is a Hopper.
absl::Status CheckHopper();

// Multiprocessors of the current device; FAILED_PRECONDITION unless it is a Hopper.
absl::StatusOr<int> MultiprocessorCount();

// Bytes a second that the current device's memory has at its peak (an H100's 3.4e12, an H200's
// 4.8e12); 0 where the driver does not say. The same at every call.
double MemoryBandwidth();

}  // namespace ringleader::kernels::sm90
