#include "kernels/sm90/hopper.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"

namespace ringleader::kernels::sm90 {

absl::Status CheckHopper() {
  return MultiprocessorCount().status();
}

absl::StatusOr<int> MultiprocessorCount() {
  int device = 0, major = 0, count = 0;
  RETURN_IF_CUDA_ERROR(cudaGetDevice(&device), "cudaGetDevice");
  RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                       "compute capability");
  if (major != 9) {
    return absl::FailedPreconditionError(
        absl::StrFormat("device %d has compute capability %d.x; these kernels need a Hopper (9.0). "
                        "Use the CPU engine",
                        device, major));
  }
  RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
                       "multiprocessor count");
  return count;
}

}  // namespace ringleader::kernels::sm90
