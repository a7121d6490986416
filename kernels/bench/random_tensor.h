// Device tensors of random bf16 values around zero.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/testing/device_buffer.h"

namespace ringleader::kernels::bench {

// Repeats one long random period; its length divides no tensor's rows.
inline DeviceBuffer<__nv_bfloat16> RandomTensor(int64_t count) {
  static const std::vector<__nv_bfloat16> period = [] {
    std::vector<__nv_bfloat16> values(10'000'019);
    uint64_t state = 88172645463325252u;
    for (__nv_bfloat16& x : values) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      x = __float2bfloat16_rn(static_cast<float>(static_cast<int64_t>(state)) * 0x1p-62f);
    }
    return values;
  }();
  DeviceBuffer<__nv_bfloat16> out(count);
  const int64_t length = static_cast<int64_t>(period.size());
  for (int64_t at = 0; at < count; at += length) {
    CheckCuda(
        cudaMemcpy(out.data() + at, period.data(),
                   sizeof(__nv_bfloat16) * std::min(count - at, length), cudaMemcpyHostToDevice),
        "fill");
  }
  return out;
}

}  // namespace ringleader::kernels::bench
