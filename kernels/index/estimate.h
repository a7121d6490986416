// The estimate of the vertical-slash index on the device: steps 1 to 3 of
// ringleader/kernels/index.h. No score matrix reaches device memory: each step computes the logits
// of the estimate queries again, on the tensor cores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {

using EstimateArgs = IndexEstimateArgs<__nv_bfloat16>;

// head_dim 64 or 128, at most kMaxEstimateQueries queries, tile 64 or 128, positions below 2^31.
// Each call needs what the ones before it wrote, summed over ranks, and sets all of its own
// outputs.
absl::Status EstimateRowMax(const EstimateArgs& args, cudaStream_t stream);
absl::Status EstimateRowSum(const EstimateArgs& args, cudaStream_t stream);
absl::Status EstimateMass(const EstimateArgs& args, cudaStream_t stream);

}  // namespace ringleader::kernels::index
