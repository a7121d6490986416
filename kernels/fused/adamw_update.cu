#include <algorithm>
#include <cmath>

#include "base/status_macros.h"
#include "kernels/fused/adamw_update.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/vector/vec.cuh"

namespace ringleader::kernels::fused {
namespace {

constexpr int kThreads = 256;
constexpr int kNormBlocks = 1024;

struct Factors {
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float step_size;      // learning_rate / (1 - beta1^t)
  float root_scale;     // 1 / sqrt(1 - beta2^t)
  float epsilon, keep;  // keep = 1 - learning_rate * weight_decay
};

__device__ __forceinline__ float Update(float& m, float& v, float master, float g,
                                        const Factors& f) {
  m = f.beta1 * m + f.one_minus_beta1 * g;
  v = f.beta2 * v + f.one_minus_beta2 * g * g;
  return master * f.keep - f.step_size * m / (sqrtf(v) * f.root_scale + f.epsilon);
}

__global__ void __launch_bounds__(kThreads) AdamwKernel(const AdamwArgs args, const Factors f) {
  const float scale = *args.gradient_scale;
  if (!isfinite(scale)) return;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (i + 4 <= args.count) {
    float4 g = __ldcs(reinterpret_cast<const float4*>(args.gradient + i));
    float4 m = __ldcs(reinterpret_cast<const float4*>(args.m + i));
    float4 v = __ldcs(reinterpret_cast<const float4*>(args.v + i));
    float4 w = __ldcs(reinterpret_cast<const float4*>(args.master + i));
    w.x = Update(m.x, v.x, w.x, g.x * scale, f);
    w.y = Update(m.y, v.y, w.y, g.y * scale, f);
    w.z = Update(m.z, v.z, w.z, g.z * scale, f);
    w.w = Update(m.w, v.w, w.w, g.w * scale, f);
    __stcs(reinterpret_cast<float4*>(args.m + i), m);
    __stcs(reinterpret_cast<float4*>(args.v + i), v);
    __stcs(reinterpret_cast<float4*>(args.master + i), w);
    if (args.parameter == nullptr) return;
    const __nv_bfloat162 low = __floats2bfloat162_rn(w.x, w.y),
                         high = __floats2bfloat162_rn(w.z, w.w);
    __stcs(reinterpret_cast<uint2*>(args.parameter + i),
           make_uint2(*reinterpret_cast<const uint32_t*>(&low),
                      *reinterpret_cast<const uint32_t*>(&high)));
    return;
  }
  for (int64_t k = i; k < args.count; ++k) {
    float m = args.m[k], v = args.v[k];
    const float w = Update(m, v, args.master[k], args.gradient[k] * scale, f);
    args.m[k] = m;
    args.v[k] = v;
    args.master[k] = w;
    if (args.parameter != nullptr) args.parameter[k] = __float2bfloat16_rn(w);
  }
}

__global__ void __launch_bounds__(kThreads)
    SquaredNormKernel(const float* values, int64_t count, float* partials) {
  __shared__ float slots[kThreads / 32];
  constexpr int kUnroll = 4;
  const int64_t vectors = count / 4, stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  float sum[kUnroll] = {};
  for (int64_t i = first; i < vectors; i += stride * kUnroll) {
    float4 x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = i + u * stride;
      x[u] = at < vectors ? __ldcs(reinterpret_cast<const float4*>(values) + at)
                          : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      sum[u] += x[u].x * x[u].x + x[u].y * x[u].y + x[u].z * x[u].z + x[u].w * x[u].w;
    }
  }
  if (first < count % 4) sum[0] += values[vectors * 4 + first] * values[vectors * 4 + first];
  const float total = BlockSum<kThreads / 32>((sum[0] + sum[1]) + (sum[2] + sum[3]), slots);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kNormBlocks) SumNormKernel(const float* partials, float* out) {
  __shared__ float slots[kNormBlocks / 32];
  const float total = BlockSum<kNormBlocks / 32>(partials[threadIdx.x], slots);
  if (threadIdx.x == 0) *out = total;
}

}  // namespace

absl::Status AdamwStep(const AdamwArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.count, "AdamwStep: count", 0, int64_t{1} << 40));
  RETURN_IF_ERROR(CheckSize(args.step, "AdamwStep: step", 1, INT64_MAX));
  if (args.count == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPointer(args.master, "AdamwStep: master"));
  RETURN_IF_ERROR(CheckPointer(args.m, "AdamwStep: m"));
  RETURN_IF_ERROR(CheckPointer(args.v, "AdamwStep: v"));
  RETURN_IF_ERROR(CheckPointer(args.gradient, "AdamwStep: gradient"));
  if (args.parameter != nullptr) {
    RETURN_IF_ERROR(CheckPointer(args.parameter, "AdamwStep: parameter"));
  }
  if (args.gradient_scale == nullptr)
    return absl::InvalidArgumentError("AdamwStep: gradient_scale is null");
  const double t = static_cast<double>(args.step);
  const Factors factors = {
      .beta1 = args.beta1,
      .beta2 = args.beta2,
      .one_minus_beta1 = static_cast<float>(1.0 - static_cast<double>(args.beta1)),
      .one_minus_beta2 = static_cast<float>(1.0 - static_cast<double>(args.beta2)),
      .step_size = static_cast<float>(args.learning_rate /
                                      (1.0 - std::pow(static_cast<double>(args.beta1), t))),
      .root_scale =
          static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(static_cast<double>(args.beta2), t))),
      .epsilon = args.epsilon,
      .keep = static_cast<float>(1.0 - static_cast<double>(args.learning_rate) * args.weight_decay),
  };
  const int64_t blocks = (args.count + 4 * kThreads - 1) / (4 * kThreads);
  AdamwKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args, factors);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "AdamwStep");
  return absl::OkStatus();
}

size_t SquaredNormWorkspaceBytes() {
  return sizeof(float) * kNormBlocks;
}

absl::Status SquaredNorm(const float* values, int64_t count, float* out, void* workspace,
                         cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(count, "SquaredNorm: count", 0, int64_t{1} << 40));
  if (count > 0) RETURN_IF_ERROR(CheckPointer(values, "SquaredNorm: values"));
  RETURN_IF_ERROR(CheckPointer(workspace, "SquaredNorm: workspace"));
  if (out == nullptr) return absl::InvalidArgumentError("SquaredNorm: out is null");
  float* partials = static_cast<float*>(workspace);
  SquaredNormKernel<<<kNormBlocks, kThreads, 0, stream>>>(values, count, partials);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SquaredNorm");
  SumNormKernel<<<1, kNormBlocks, 0, stream>>>(partials, out);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SquaredNorm: total");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::fused
