#include <cooperative_groups.h>

#include "base/status_macros.h"
#include "kernels/fused/cross_entropy.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/vec.cuh"

namespace ringleader::kernels::fused {
namespace {

namespace cg = cooperative_groups;

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

// Copies 16 bytes to shared memory without passing registers; done after CopyWait.
__device__ __forceinline__ void CopyAsync(Bf16x8* to, const __nv_bfloat16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
__device__ __forceinline__ void CopyWait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// A cluster of blocks works on one row at a time, a few in all. Every 16-byte vector of the
// row sits in a register of one thread from load to store: one read, one write. The next row is on
// its way to shared memory meanwhile, each thread's vectors to places that only it reads.
template <int kCluster, int kThreads, int V, int kMinBlocks>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, kMinBlocks)
    CrossEntropyKernel(const CrossEntropyArgs args) {
  constexpr int kWarps = kThreads / 32;
  __shared__ Softmax warps[kWarps];
  extern __shared__ Bf16x8 next[];  // [V][kThreads]
  cg::cluster_group cluster = cg::this_cluster();
  const int lane_of_row = cluster.block_rank() * kThreads + threadIdx.x;
  const int vocabulary = static_cast<int>(args.vocabulary), stride = static_cast<int>(args.stride);
  const int clusters = gridDim.x / kCluster;
  const auto prefetch = [&](int64_t row) {
    if (row >= args.rows) return;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = (lane_of_row + v * kCluster * kThreads) * kVec;
      if (c < vocabulary)
        CopyAsync(&next[v * kThreads + threadIdx.x], args.logits + row * args.stride + c);
    }
  };
  const int64_t first = blockIdx.x / kCluster;
  prefetch(first);
  for (int64_t row = first; row < args.rows; row += clusters) {
    __nv_bfloat16* logits = args.logits + row * args.stride;
    const int64_t wide_label = args.labels[row];
    const bool ignored = wide_label == kIgnoredLabel;
    const int label =
        wide_label >= 0 && wide_label < vocabulary ? static_cast<int>(wide_label) : -1;
    // Read before anyone overwrites it: a barrier stands between.
    float label_logit = NAN;
    if (lane_of_row == 0 && label >= 0) label_logit = __bfloat162float(logits[label]);

    Bf16x8 x[V];
    CopyWait();
#pragma unroll
    for (int v = 0; v < V; ++v) x[v] = next[v * kThreads + threadIdx.x];
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
    prefetch(row + clusters);
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
    if (row != first) cluster.barrier_wait();  // all have read the last row's sums
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    cluster.sync();
    // Every warp merges the sums of all warps of the cluster, a few in each lane.
    Softmax total = {-INFINITY, 0.0f};
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < kCluster * kWarps; i += 32) {
      const Softmax other = *cluster.map_shared_rank(&warps[i % kWarps], i / kWarps);
      if (other.max == -INFINITY) continue;
      const float max = fmaxf(total.max, other.max);
      total = {max, total.sum * Exp2(total.max - max) + other.sum * Exp2(other.max - max)};
    }
    total = WarpMerge(total);
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
  }
  if (first < args.rows) cluster.barrier_wait();  // nobody leaves while its sums are read
}

// Each cluster takes kRows rows: enough for the fetching ahead to pay, few enough that clusters
// start at different times and do not all wait or all store at once.
template <int kCluster, int kThreads, int V, int kMinBlocks, int kRows>
absl::Status Launch(const CrossEntropyArgs& args, cudaStream_t stream) {
  constexpr size_t kSharedBytes = sizeof(Bf16x8) * V * kThreads;
  const auto kernel = CrossEntropyKernel<kCluster, kThreads, V, kMinBlocks>;
  RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(kSharedBytes)),
                       "CrossEntropy: shared memory");
  const int64_t clusters = (args.rows + kRows - 1) / kRows;
  kernel<<<static_cast<unsigned>(clusters * kCluster), kThreads, kSharedBytes, stream>>>(args);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "CrossEntropy");
  return absl::OkStatus();
}

}  // namespace

absl::Status CrossEntropy(const CrossEntropyArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.vocabulary, "CrossEntropy: vocabulary", 1, kMaxVocabulary));
  RETURN_IF_ERROR(
      CheckSize(args.stride, "CrossEntropy: stride", args.vocabulary, kMaxVocabulary, kVec));
  RETURN_IF_ERROR(CheckSize(args.rows, "CrossEntropy: rows", 0, INT32_MAX / 8));
  if (args.rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPointer(args.logits, "CrossEntropy: logits"));
  if (args.labels == nullptr) return absl::InvalidArgumentError("CrossEntropy: labels is null");
  if (args.loss == nullptr) return absl::InvalidArgumentError("CrossEntropy: loss is null");
  if (args.gradient && args.gradient_scale == nullptr) {
    return absl::InvalidArgumentError(
        "CrossEntropy: gradient_scale is null; set it, or gradient = false");
  }
  // The fewest blocks whose registers hold a row.
  const int64_t vectors = args.stride / kVec;
  if (vectors <= 2 * 512 * 4) return Launch<2, 512, 4, 3, 2>(args, stream);
  if (vectors <= 8 * 512 * 4) return Launch<8, 512, 4, 3, 4>(args, stream);
  if (vectors <= 8 * 512 * 5) return Launch<8, 512, 5, 3, 4>(args, stream);
  return Launch<8, 512, 8, 1, 4>(args, stream);
}

}  // namespace ringleader::kernels::fused
