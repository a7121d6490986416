// CUDA errors as absl::Status, and the argument checks that every launcher shares.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace ringleader::kernels::fused {

// Ok, or INTERNAL with the CUDA error, the place and what was being done.
absl::Status CudaStatus(cudaError_t error, const char* what, const char* file, int line);

// INVALID_ARGUMENT naming `name` unless `pointer` is set. It may be a rank's place in an array of
// all ranks'.
absl::Status CheckSet(const void* pointer, const char* name);
// INVALID_ARGUMENT naming `name` unless `pointer` is set and 16-byte aligned (the kernels load 16
// bytes at a time).
absl::Status CheckPointer(const void* pointer, const char* name);
// INVALID_ARGUMENT unless min <= value <= max and value % multiple == 0.
absl::Status CheckSize(int64_t value, const char* name, int64_t min, int64_t max,
                       int64_t multiple = 1);
// INVALID_ARGUMENT unless it is a number of tokens that the kernels have tiles of: 64 or 128.
absl::Status CheckTile(int32_t tile, const char* name);

}  // namespace ringleader::kernels::fused

#define RETURN_IF_CUDA_ERROR(expression, what) \
  RETURN_IF_ERROR(                             \
      ::ringleader::kernels::fused::CudaStatus((expression), (what), __FILE__, __LINE__))
