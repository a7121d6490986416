#include "kernels/sm90/hopper.h"

#include <cuda_runtime_api.h>

#include <vector>

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

double MemoryBandwidth() {
  // The driver reads a memory's clock over PCIe, which takes as long as a small kernel: once.
  static const std::vector<double> of_device = [] {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
    std::vector<double> bandwidths(devices, 0.0);
    for (int device = 0; device < devices; ++device) {
      int kilohertz = 0, bits = 0;
      const bool is_known =
          cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device) == cudaSuccess &&
          cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device) == cudaSuccess;
      constexpr double kTransfersAClock = 2;
      if (is_known) bandwidths[device] = kTransfersAClock * 1000.0 * kilohertz * bits / 8;
    }
    static_cast<void>(cudaGetLastError());  // a driver that does not say is no fault of the caller
    return bandwidths;
  }();
  int device = 0;
  const bool is_known =
      cudaGetDevice(&device) == cudaSuccess && device < static_cast<int>(of_device.size());
  return is_known ? of_device[device] : 0;
}

}  // namespace ringleader::kernels::sm90
