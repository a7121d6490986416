// What groups of keys are scored by, on the device: DimEnergyStep, PickDimsStep and NarrowRowsStep
// say what it is. The same bits as the CPU engine's.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {

// q: [n, heads, d] and k: [n, kv_heads, d], this rank's, d 64 or 128; aligned to 16 bytes, strides
// multiples of 8.
absl::Status SumDimEnergy(const TokenMajor<const __nv_bfloat16>& q,
                          const TokenMajor<const __nv_bfloat16>& k, const DimEnergyStep& step,
                          cudaStream_t stream);
absl::Status PickDims(int kv_heads, int head_dim, const PickDimsStep& step, cudaStream_t stream);
absl::Status NarrowRows(const TokenMajor<const __nv_bfloat16>& q,
                        const TokenMajor<const __nv_bfloat16>& k, const NarrowRowsStep& step,
                        cudaStream_t stream);

}  // namespace ringleader::kernels::index
