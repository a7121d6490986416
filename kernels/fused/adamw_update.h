// AdamW over a flat shard of parameters, and the squared norm that gradient clipping needs. Nothing
// waits for the host: the clipping factor and the decision to skip a step that went wrong are read
// on the device.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"

namespace ringleader::kernels::fused {

// With g = gradient * *gradient_scale and t = step:
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   master -= learning_rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) +
//   weight_decay * master) parameter = bf16(master)
// Nothing changes when *gradient_scale is not finite.
struct AdamwArgs {
  float* master = nullptr;                // [count]
  float* m = nullptr;                     // [count]
  float* v = nullptr;                     // [count]
  const float* gradient = nullptr;        // [count]
  __nv_bfloat16* parameter = nullptr;     // [count], or null
  const float* gradient_scale = nullptr;  // one float on the device
  int64_t count = 0;                      // any
  int64_t step = 1;                       // from 1
  float learning_rate = 0.0f;
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float epsilon = 1e-8f;
  float weight_decay = 0.0f;
};
absl::Status AdamwStep(const AdamwArgs& args, cudaStream_t stream);

// *out = sum of values[i]^2, in fp32 with a fixed order: the same bits every time.
size_t SquaredNormWorkspaceBytes();
absl::Status SquaredNorm(const float* values, int64_t count, float* out, void* workspace,
                         cudaStream_t stream);

}  // namespace ringleader::kernels::fused
