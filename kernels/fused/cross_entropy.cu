#include <cooperative_groups.h>

#include "base/status_macros.h"
#include "kernels/fused/cross_entropy.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/vec.cuh"

namespace ringleader::kernels::fused {
namespace {

namespace cg = cooperative_groups;

constexpr int kMaxCluster = 8;
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

// sum = sum of 2^(x - max), x in units of log2.
struct alignas(8) Softmax {
  float max;
  float sum;
};

// Of all lanes. The maximum goes first, so that each lane rescales its sum once.
__device__ __forceinline__ Softmax WarpMerge(Softmax mine) {
  float max = mine.max;
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2)
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, lane));
  return {max, WarpSum(mine.max == -INFINITY ? 0.0f : mine.sum * Exp2(mine.max - max))};
}

// Every 16-byte vector of the row sits in a register of one thread of the cluster from load to
// store: one read, one write. kMinBlocks keeps enough blocks on a multiprocessor that loads of one
// row run beside the stores of another.
template <int kCluster, int kThreads, int V, int kMinBlocks>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, kMinBlocks)
    CrossEntropyKernel(const CrossEntropyArgs args) {
  constexpr int kWarps = kThreads / 32;
  __shared__ Softmax warps[kWarps];
  constexpr int kSumsPerLane = (kCluster * kWarps + 31) / 32;
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

  // The arithmetic, not the memory, is what could be slow here: the maximum is taken in pairs of
  // bf16.
  __nv_bfloat162 pair_max = __float2bfloat162_rn(-INFINITY);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int c = (lane_of_row + v * kCluster * kThreads) * kVec;
    if (c >= vocabulary) continue;
    if (c + kVec > vocabulary) {
      float f[kVec];
      Unpack(x[v], f);
#pragma unroll
      for (int e = 0; e < kVec; ++e) f[e] = c + e < vocabulary ? f[e] : -INFINITY;
      x[v] = Pack(f);
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) pair_max = __hmax2_nan(pair_max, x[v].pair[pair]);
  }
  const float2 max_of_pair = __bfloat1622float2(pair_max);
  Softmax mine = {fmaxf(max_of_pair.x, max_of_pair.y) * kLog2e, 0.0f};
  const float shift = mine.max == -INFINITY ? 0.0f : mine.max;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if ((lane_of_row + v * kCluster * kThreads) * kVec >= vocabulary) continue;
    float f[kVec];
    Unpack(x[v], f);
#pragma unroll
    for (int e = 0; e < kVec; ++e) mine.sum += Exp2(fmaf(f[e], kLog2e, -shift));
  }
  mine = WarpMerge(mine);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  cluster.sync();
  // Every warp merges the sums of all warps of the cluster, a few in each lane.
  Softmax of_lane[kSumsPerLane], total = {-INFINITY, 0.0f};
#pragma unroll
  for (int i = 0; i < kSumsPerLane; ++i) {
    const int warp = threadIdx.x % 32 + i * 32;
    of_lane[i] = warp < kCluster * kWarps
                     ? *cluster.map_shared_rank(&warps[warp % kWarps], warp / kWarps)
                     : Softmax{-INFINITY, 0.0f};
    total.max = fmaxf(total.max, of_lane[i].max);
  }
#pragma unroll
  for (int i = 0; i < kSumsPerLane; ++i) {
    if (of_lane[i].max > -INFINITY) total.sum += of_lane[i].sum * Exp2(of_lane[i].max - total.max);
  }
  total = WarpMerge(total);
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
        f[e] = Exp2(fmaf(f[e], kLog2e, -lse2)) * scale;
      }
      if (c <= label && label < c + kVec) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) f[e] -= c + e == label ? scale : 0.0f;
      }
      StoreStream(logits + c, Pack(f));
    }
  }
  cluster.barrier_wait();
}

template <int kCluster, int kThreads, int V, int kMinBlocks>
void Launch(const CrossEntropyArgs& args, cudaStream_t stream) {
  CrossEntropyKernel<kCluster, kThreads, V, kMinBlocks>
      <<<static_cast<unsigned>(args.rows * kCluster), kThreads, 0, stream>>>(args);
}

}  // namespace

absl::Status CrossEntropy(const CrossEntropyArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.vocabulary, "CrossEntropy: vocabulary", 1, kMaxVocabulary));
  RETURN_IF_ERROR(
      CheckSize(args.stride, "CrossEntropy: stride", args.vocabulary, kMaxVocabulary, kVec));
  RETURN_IF_ERROR(CheckSize(args.rows, "CrossEntropy: rows", 0, INT32_MAX / kMaxCluster));
  if (args.rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPointer(args.logits, "CrossEntropy: logits"));
  if (args.labels == nullptr) return absl::InvalidArgumentError("CrossEntropy: labels is null");
  if (args.loss == nullptr) return absl::InvalidArgumentError("CrossEntropy: loss is null");
  if (args.gradient && args.gradient_scale == nullptr) {
    return absl::InvalidArgumentError(
        "CrossEntropy: gradient_scale is null; set it, or gradient = false");
  }
  // The fewest blocks whose registers hold a row. Few registers a thread let more rows be in
  // flight.
  const int64_t vectors = args.stride / kVec;
  if (vectors <= 4 * 256 * 4) {
    Launch<4, 256, 4, 8>(args, stream);
  } else if (vectors <= 8 * 512 * 4) {
    Launch<8, 512, 4, 4>(args, stream);
  } else if (vectors <= 8 * 512 * 5) {
    Launch<8, 512, 5, 3>(args, stream);
  } else {
    Launch<8, 512, 8, 1>(args, stream);
  }
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "CrossEntropy");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::fused
