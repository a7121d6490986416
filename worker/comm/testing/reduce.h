// Sums and maxima of several buffers on one GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "worker/comm/device_communicator.h"

namespace ringleader::comm::testing {

// out[i] = the sum or maximum over `inputs` of input[i], in their order; at most 8 of them.
cudaError_t Reduce(const std::vector<const void*>& inputs, size_t count, ElementType type,
                   bool maximum, void* out, cudaStream_t stream);

}  // namespace ringleader::comm::testing
