#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "worker/comm/testing/reduce.h"

namespace ringleader::comm::testing {
namespace {

constexpr int kMaxInputs = 8;

struct Inputs {
  const void* data[kMaxInputs];
  int count;
};

// T: of the buffers; Sum: what is added up.
template <typename T, typename Sum>
__global__ void ReduceKernel(Inputs inputs, size_t count, bool maximum, T* out) {
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < count; i += gridDim.x * size_t{256}) {
    Sum sum = static_cast<Sum>(static_cast<const T*>(inputs.data[0])[i]);
    for (int k = 1; k < inputs.count; ++k) {
      const Sum term = static_cast<Sum>(static_cast<const T*>(inputs.data[k])[i]);
      sum = maximum ? (term > sum ? term : sum) : sum + term;
    }
    out[i] = static_cast<T>(sum);
  }
}

template <typename T, typename Sum>
cudaError_t Launch(const Inputs& inputs, size_t count, bool maximum, void* out,
                   cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::clamp<size_t>((count + 255) / 256, 1, 1024));
  ReduceKernel<T, Sum><<<blocks, 256, 0, stream>>>(inputs, count, maximum, static_cast<T*>(out));
  return cudaGetLastError();
}

}  // namespace

cudaError_t Reduce(const std::vector<const void*>& inputs, size_t count, ElementType type,
                   bool maximum, void* out, cudaStream_t stream) {
  if (inputs.empty() || inputs.size() > kMaxInputs) return cudaErrorInvalidValue;
  Inputs all = {};
  std::copy(inputs.begin(), inputs.end(), all.data);
  all.count = static_cast<int>(inputs.size());
  switch (type) {
    case ElementType::kFloat32:
      return Launch<float, float>(all, count, maximum, out, stream);
    case ElementType::kBfloat16:
      return Launch<__nv_bfloat16, float>(all, count, maximum, out, stream);
    case ElementType::kInt32:
      return Launch<int32_t, int32_t>(all, count, maximum, out, stream);
    case ElementType::kInt64:
      return Launch<int64_t, int64_t>(all, count, maximum, out, stream);
    case ElementType::kFloat64:
      return Launch<double, double>(all, count, maximum, out, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ringleader::comm::testing
