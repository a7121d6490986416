#include "kernels/fused/cuda_status.h"

#include "absl/strings/str_format.h"

namespace ringleader::kernels::fused {
namespace {

const char* Hint(cudaError_t error) {
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
      return "; the kernels are built for compute capability 9.0 (H100, H200)";
    case cudaErrorMemoryAllocation:
      return "; the device is out of memory";
    case cudaErrorInsufficientDriver:
      return "; the driver is older than the CUDA runtime, install a newer one";
    default:
      return "";
  }
}

}  // namespace

absl::Status CudaStatus(cudaError_t error, const char* what, const char* file, int line) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat("%s: CUDA error %s (%s) at %s:%d%s", what,
                                             cudaGetErrorName(error), cudaGetErrorString(error),
                                             file, line, Hint(error)));
}

absl::Status CheckSet(const void* pointer, const char* name) {
  if (pointer == nullptr) return absl::InvalidArgumentError(absl::StrFormat("%s is null", name));
  return absl::OkStatus();
}

absl::Status CheckPointer(const void* pointer, const char* name) {
  if (absl::Status set = CheckSet(pointer, name); !set.ok()) return set;
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s (%p) is not 16-byte aligned; pass an aligned allocation", name, pointer));
  }
  return absl::OkStatus();
}

absl::Status CheckSize(int64_t value, const char* name, int64_t min, int64_t max,
                       int64_t multiple) {
  if (value >= min && value <= max && value % multiple == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s is %d; allowed are multiples of %d from %d to %d", name, value, multiple, min, max));
}

absl::Status CheckTile(int32_t tile, const char* name) {
  if (tile == 64 || tile == 128) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is %d; tiles have 64 or 128 tokens", name, tile));
}

}  // namespace ringleader::kernels::fused
