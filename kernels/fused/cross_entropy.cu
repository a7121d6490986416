#include <cooperative_groups.h>

#include "base/status_macros.h"
#include "kernels/fused/cross_entropy.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/vec.cuh"

namespace ringleader::fused {
namespace {

namespace cg = cooperative_groups;

constexpr int kCluster = 8;  // blocks that share a row
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

// sum = sum of 2^(x - max), x in units of log2.
struct Softmax {
  float max;
  float sum;
};

__device__ __forceinline__ Softmax Merge(Softmax a, Softmax b) {
  const float max = fmaxf(a.max, b.max);
  if (max == -INFINITY) return {max, 0.0f};
  return {max, a.sum * exp2f(a.max - max) + b.sum * exp2f(b.max - max)};
}

// Every 16-byte vector of the row sits in a register of one thread of the cluster from load to
// store: one read, one write. kMinBlocks keeps enough blocks on a multiprocessor that loads of one
// row run beside the stores of another.
template <int V, int kMinBlocks>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, kMinBlocks)
    CrossEntropyKernel(const CrossEntropyArgs args) {
  __shared__ Softmax warps[kWarps];
  __shared__ Softmax block;
  cg::cluster_group cluster = cg::this_cluster();
  const int64_t row = blockIdx.x / kCluster;
  const int lane_of_row = cluster.block_rank() * kThreads + threadIdx.x;
  __nv_bfloat16* logits = args.logits + row * args.stride;
  const int vocabulary = static_cast<int>(args.vocabulary), stride = static_cast<int>(args.stride);
  const int64_t wide_label = args.labels[row];
  const bool ignored = wide_label == kIgnoredLabel;
  const int label = wide_label >= 0 && wide_label < vocabulary ? static_cast<int>(wide_label) : -1;

  Bf16x8 x[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int c = (lane_of_row + v * kCluster * kThreads) * kVec;
    if (c < vocabulary) x[v] = LoadStream(logits + c);
  }
  // Read before anyone overwrites it: the barrier below stands between.
  float label_logit = NAN;
  if (lane_of_row == 0 && label >= 0) label_logit = __bfloat162float(logits[label]);

  Softmax mine = {-INFINITY, 0.0f};
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int c = (lane_of_row + v * kCluster * kThreads) * kVec;
    if (c >= vocabulary) continue;
    float f[kVec];
    Unpack(x[v], f);
    if (c + kVec > vocabulary) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) f[e] = c + e < vocabulary ? f[e] : -INFINITY;
      x[v] = Pack(f);
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e) mine.max = fmaxf(mine.max, f[e]);
  }
  mine.max *= kLog2e;
  const float shift = mine.max == -INFINITY ? 0.0f : mine.max;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if ((lane_of_row + v * kCluster * kThreads) * kVec >= vocabulary) continue;
    float f[kVec];
    Unpack(x[v], f);
#pragma unroll
    for (int e = 0; e < kVec; ++e) mine.sum += exp2f(fmaf(f[e], kLog2e, -shift));
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    mine = Merge(mine, {__shfl_xor_sync(0xffffffffu, mine.max, lane),
                        __shfl_xor_sync(0xffffffffu, mine.sum, lane)});
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    Softmax total = warps[0];
    for (int w = 1; w < kWarps; ++w) total = Merge(total, warps[w]);
    block = total;
  }
  cluster.sync();
  Softmax total = *cluster.map_shared_rank(&block, 0);
#pragma unroll
  for (int b = 1; b < kCluster; ++b) total = Merge(total, *cluster.map_shared_rank(&block, b));
  // A block may leave once all have read its sums.
  cluster.barrier_arrive();

  const float lse2 = total.max + log2f(total.sum);
  if (lane_of_row == 0) args.loss[row] = ignored ? 0.0f : lse2 * kLn2 - label_logit;
  if (args.gradient) {
    const float scale = ignored ? 0.0f : *args.gradient_scale;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = (lane_of_row + v * kCluster * kThreads) * kVec;
      if (c >= stride) continue;
      if (c >= vocabulary || ignored) {
        StoreStream(logits + c, ZeroVec());
        continue;
      }
      float f[kVec];
      Unpack(x[v], f);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float p = exp2f(fmaf(f[e], kLog2e, -lse2));
        f[e] = (c + e == label ? p - 1.0f : p) * scale;
      }
      StoreStream(logits + c, Pack(f));
    }
  }
  cluster.barrier_wait();
}

}  // namespace

absl::Status CrossEntropy(const CrossEntropyArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.vocabulary, "CrossEntropy: vocabulary", 1, kMaxVocabulary));
  RETURN_IF_ERROR(
      CheckSize(args.stride, "CrossEntropy: stride", args.vocabulary, kMaxVocabulary, kVec));
  RETURN_IF_ERROR(CheckSize(args.rows, "CrossEntropy: rows", 0, INT32_MAX / kCluster));
  if (args.rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPointer(args.logits, "CrossEntropy: logits"));
  if (args.labels == nullptr) return absl::InvalidArgumentError("CrossEntropy: labels is null");
  if (args.loss == nullptr) return absl::InvalidArgumentError("CrossEntropy: loss is null");
  if (args.gradient && args.gradient_scale == nullptr) {
    return absl::InvalidArgumentError(
        "CrossEntropy: gradient_scale is null; set it, or gradient = false");
  }
  const unsigned grid = static_cast<unsigned>(args.rows * kCluster);
  const int64_t per_vector = int64_t{kCluster} * kThreads * kVec;
  const int64_t vectors = (args.stride + per_vector - 1) / per_vector;
  if (vectors <= 2) {
    CrossEntropyKernel<2, 4><<<grid, kThreads, 0, stream>>>(args);
  } else if (vectors <= 5) {
    CrossEntropyKernel<5, 3><<<grid, kThreads, 0, stream>>>(args);
  } else {
    CrossEntropyKernel<8, 2><<<grid, kThreads, 0, stream>>>(args);
  }
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "CrossEntropy");
  return absl::OkStatus();
}

}  // namespace ringleader::fused
