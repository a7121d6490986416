// One read of a row of logits and, with a gradient, one write: a cluster of blocks keeps the row in
// shared memory from the first pass (maximum and sum) to the second (gradient). The copy engine
// fills a ring of chunks ahead of both passes; the second frees a row's chunks one by one, and rows
// to come take their places.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/fused/cross_entropy.h"
#include "kernels/fused/vector/vec.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/tma.cuh"

namespace ringleader::kernels::fused {

namespace ptx = sm90::ptx;

// How a vocabulary is cut. A block's share of a row must leave chunks of the ring free.
template <int kClusterBlocks, int kThreadsOfBlock, int kVectorsOfThread, int kRingChunks,
          int kBlocksOfProcessor>
struct EntropyPlan {
  static constexpr int kCluster = kClusterBlocks;
  static constexpr int kThreads = kThreadsOfBlock;  // and a warp that loads
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kVectors = kVectorsOfThread;  // of a chunk
  static constexpr int kChunk = kThreads * kVectors;
  static constexpr int kSlots = kRingChunks;
  static constexpr int kMinBlocks = kBlocksOfProcessor;
};

// sum = sum of 2^(x - shift), x in units of log2. No x is more than 2^kSlack times 2^shift, and one
// comes close to it; -infinity before the first finite x.
struct alignas(8) Softmax {
  float shift = -INFINITY;
  float sum = 0.0f;
};
// The shift moves when the maximum has passed it by this much: rarely after the first chunk.
inline constexpr float kSlack = 32.0f;

template <typename Plan>
struct EntropyShared {
  alignas(128) Bf16x8 ring[Plan::kSlots][Plan::kChunk];
  Softmax sums[2][Plan::kCluster * Plan::kWarps];  // of this row and the next
  ptx::Mbarrier full[Plan::kSlots];
  ptx::Mbarrier empty[Plan::kSlots];
  ptx::Mbarrier summed[2];
};

// What a block has of every row, in vectors.
template <typename Plan>
struct EntropyShare {
  int begin, count, chunks;

  __device__ explicit EntropyShare(const CrossEntropyArgs& args) {
    const int vectors = static_cast<int>(args.stride / kVec);
    // Whole lines of 128 bytes.
    const int share = ((vectors + Plan::kCluster - 1) / Plan::kCluster + 7) / 8 * 8;
    begin = min(vectors, ptx::ClusterRank() * share);
    count = min(vectors - begin, share);
    chunks = (count + Plan::kChunk - 1) / Plan::kChunk;
  }
};

// Merges the sums of all lanes.
__device__ __forceinline__ Softmax WarpMerge(Softmax mine) {
  float shift = mine.shift;
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2)
    shift = fmaxf(shift, __shfl_xor_sync(0xffffffffu, shift, lane));
  // A sum without a shift is 0 or NaN.
  const float scale = mine.shift == -INFINITY ? 1.0f : Exp2(mine.shift - shift);
  return {shift, WarpSum(mine.sum * scale)};
}

__device__ __forceinline__ void Merge(Softmax& into, Softmax other) {
  const float shift = fmaxf(into.shift, other.shift);
  into.sum = into.sum * (into.shift == -INFINITY ? 1.0f : Exp2(into.shift - shift)) +
             other.sum * (other.shift == -INFINITY ? 1.0f : Exp2(other.shift - shift));
  into.shift = shift;
}

template <typename Plan>
__device__ __forceinline__ void NextSlot(int& slot, uint32_t& parity) {
  if (++slot < Plan::kSlots) return;
  slot = 0;
  parity ^= 1;
}

// To be called when this warp has used what it read from a slot, not when it has issued the reads:
// an arrival does not wait for them, nor does the copy engine, which may then overwrite the slot.
__device__ __forceinline__ void ReleaseSlot(ptx::Mbarrier& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(&empty);
}

// One thread calls. Loads the block's chunks of all its rows in turn.
template <typename Plan>
__device__ __forceinline__ void LoadRows(const CrossEntropyArgs& args,
                                         const EntropyShare<Plan>& share, int64_t first_row,
                                         int row_step, EntropyShared<Plan>& shared) {
  int slot = 0;
  uint32_t parity = 1;  // all slots are empty
  for (int64_t row = first_row; row < args.rows; row += row_step) {
    const __nv_bfloat16* from = args.logits + row * args.stride + share.begin * kVec;
    for (int chunk = 0; chunk < share.chunks; ++chunk) {
      const int at = chunk * Plan::kChunk;
      const uint32_t bytes = sizeof(Bf16x8) * min(Plan::kChunk, share.count - at);
      ptx::MbarrierWait(&shared.empty[slot], parity);
      ptx::MbarrierArriveExpect(&shared.full[slot], bytes);
      ptx::BulkLoad(shared.ring[slot], from + at * kVec, bytes, &shared.full[slot]);
      NextSlot<Plan>(slot, parity);
    }
  }
}

// Adds a chunk to a thread's sum.
template <int kVectors>
__device__ __forceinline__ void AddVectors(const Bf16x8 (&x)[kVectors], Softmax& mine) {
  // The maximum is taken of pairs of bf16; a NaN stays.
  __nv_bfloat162 top = x[0].pair[0];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) top = __hmax2_nan(top, x[v].pair[pair]);
  }
  const float2 two = __bfloat1622float2(top);
  const float max = fmaxf(two.x, two.y) * ptx::kLog2E;
  if (max > mine.shift + kSlack) {
    mine.sum = mine.sum == 0.0f ? 0.0f : mine.sum * Exp2(mine.shift - max);
    mine.shift = max;
  }
  const float shift = mine.shift == -INFINITY ? 0.0f : mine.shift;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float f[kVec];
    Unpack(x[v], f);
#pragma unroll
    for (int e = 0; e < kVec; ++e) f[e] = Exp2(fmaf(f[e], ptx::kLog2E, -shift));
    mine.sum += ((f[0] + f[1]) + (f[2] + f[3])) + ((f[4] + f[5]) + (f[6] + f[7]));
  }
}

// One thread calls.
template <typename Plan>
__device__ __forceinline__ void InitEntropyBarriers(EntropyShared<Plan>& shared) {
  for (int slot = 0; slot < Plan::kSlots; ++slot) {
    ptx::MbarrierInit(&shared.full[slot], 1);
    ptx::MbarrierInit(&shared.empty[slot], Plan::kWarps);
  }
  for (ptx::Mbarrier& summed : shared.summed) ptx::MbarrierInit(&summed, 1);
  ptx::MbarrierInitFence();
}

// Where this thread's vectors lie in a chunk: here and every 32 vectors after it.
template <typename Plan>
__device__ __forceinline__ int FirstVector() {
  return static_cast<int>(threadIdx.x / 32 * 32 * Plan::kVectors + threadIdx.x % 32);
}

// The label of a row, as this thread meets it.
template <typename Plan>
struct EntropyLabel {
  __device__ __forceinline__ EntropyLabel(int64_t wide, int vocabulary,
                                          const EntropyShare<Plan>& share)
      : ignored(wide == kIgnoredLabel), exists(wide >= 0 && wide < vocabulary) {
    const int label = exists ? static_cast<int>(wide) : 0;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int vector = label / kVec - share.begin, in_chunk = vector % Plan::kChunk;
    const bool own = exists && vector >= 0 && vector < share.count &&
                     in_chunk / (32 * Plan::kVectors) == warp && in_chunk % 32 == lane;
    chunk = own ? vector / Plan::kChunk : -1;
    place = in_chunk * kVec + label % kVec;
  }

  __device__ __forceinline__ bool own() const { return chunk >= 0; }

  bool ignored, exists;
  int chunk;  // in which this thread meets the label; -1: another thread does, or nobody
  int place;  // of the label in its chunk
};

// Takes what lies past the vocabulary, or past the block's share of it, out of the vectors from the
// share's `first`th on.
template <typename Plan>
__device__ __forceinline__ void HideVectors(Bf16x8 (&x)[Plan::kVectors],
                                            const EntropyShare<Plan>& share, int first,
                                            int vocabulary) {
#pragma unroll
  for (int v = 0; v < Plan::kVectors; ++v) {
    const int vector = first + v * 32;
    const int left = vector < share.count ? vocabulary - (share.begin + vector) * kVec : 0;
    float f[kVec];
    Unpack(x[v], f);
#pragma unroll
    for (int e = 0; e < kVec; ++e) f[e] = e < left ? f[e] : -INFINITY;
    x[v] = Pack(f);
  }
}

// Writes the gradient of a row's logits, scale * (softmax - one at the label), over the block's
// share of them, `out`, from the chunks that still lie in the ring from slot `from` on, and lets
// these go.
template <typename Plan>
__device__ __forceinline__ void WriteGradient(__nv_bfloat16* out, EntropyShared<Plan>& shared,
                                              int from, const EntropyShare<Plan>& share,
                                              int vocabulary, const EntropyLabel<Plan>& label,
                                              float label_logit, float lse2, float scale) {
  constexpr int kVectors = Plan::kVectors, kChunk = Plan::kChunk;
  const int place = FirstVector<Plan>();
  for (int chunk = 0; chunk < share.chunks; ++chunk, out += kChunk * kVec) {
    Bf16x8 x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) x[v] = shared.ring[from][place + v * 32];
    const int left = share.count - chunk * kChunk;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float f[kVec];
      Unpack(x[v], f);
#pragma unroll
      for (int e = 0; e < kVec; ++e) f[e] = Exp2(fmaf(f[e], ptx::kLog2E, -lse2)) * scale;
      x[v] = label.ignored ? ZeroVec() : Pack(f);
      if (place + v * 32 < left) StoreStream(out + (place + v * 32) * kVec, x[v]);
    }
    ReleaseSlot(shared.empty[from]);
    from = from + 1 == Plan::kSlots ? 0 : from + 1;
    // Single columns over it: the label, and those past the vocabulary. (Chosen by index in
    // registers, they would put every vector through local memory.)
    if (chunk == label.chunk) {
      const float p = Exp2(fmaf(label_logit, ptx::kLog2E, -lse2));
      out[label.place] = __float2bfloat16_rn(p * scale - scale);
    }
    const int columns = vocabulary - (share.begin + chunk * kChunk) * kVec;
    if (columns >= kChunk * kVec) continue;
    for (int v = 0; v < kVectors; ++v) {
      const int vector = place + v * 32;
      for (int c = max(columns, vector * kVec); vector < left && c < (vector + 1) * kVec; ++c)
        out[c] = __float2bfloat16_rn(0.0f);
    }
  }
}

// Clusters take rows in turn.
template <typename Plan, bool kGradient>
__global__ void __launch_bounds__(Plan::kThreads + 32, Plan::kMinBlocks)
    CrossEntropyKernel(const CrossEntropyArgs args) {
  constexpr int kCluster = Plan::kCluster, kWarps = Plan::kWarps, kVectors = Plan::kVectors,
                kChunk = Plan::kChunk;
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<EntropyShared<Plan>*>(smem);
  const EntropyShare<Plan> share(args);
  const int64_t first_row = blockIdx.x / kCluster;
  const int row_step = gridDim.x / kCluster;
  if (threadIdx.x == 0) InitEntropyBarriers(shared);
  ptx::ClusterSync();
  if (threadIdx.x >= Plan::kThreads) {
    if (threadIdx.x == Plan::kThreads) LoadRows<Plan>(args, share, first_row, row_step, shared);
    __syncwarp();
    ptx::ClusterSync();  // the others may send sums until here
    return;
  }

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = FirstVector<Plan>();
  const int vocabulary = static_cast<int>(args.vocabulary), whole_vectors = vocabulary / kVec;
  int slot = 0, turn = 0;
  uint32_t parity = 0;
  for (int64_t row = first_row; row < args.rows; row += row_step, ++turn) {
    // Sums and barrier in turns of two: a block may send its next sums while another still reads
    // or awaits these.
    ptx::Mbarrier* summed = &shared.summed[turn % 2];
    Softmax* sums = shared.sums[turn % 2];
    if (kCluster > 1 && threadIdx.x == 0)
      ptx::MbarrierArriveExpect(summed, sizeof(Softmax) * kCluster * kWarps);

    const EntropyLabel<Plan> label(args.labels[row], vocabulary, share);
    float label_logit = NAN;

    const int first_slot = slot;
    Softmax mine;
    for (int chunk = 0; chunk < share.chunks; ++chunk) {
      ptx::MbarrierWait(&shared.full[slot], parity);
      if (chunk == label.chunk) {
        label_logit = __bfloat162float(
            reinterpret_cast<const __nv_bfloat16*>(shared.ring[slot])[label.place]);
      }
      Bf16x8 x[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) x[v] = shared.ring[slot][place + v * 32];
      const int end = (chunk + 1) * kChunk;
      if (end > share.count || share.begin + end > whole_vectors) {
        HideVectors<Plan>(x, share, chunk * kChunk + place, vocabulary);
      }
      AddVectors(x, mine);
      if constexpr (!kGradient) ReleaseSlot(shared.empty[slot]);
      NextSlot<Plan>(slot, parity);
    }
    mine = WarpMerge(mine);
    if constexpr (kCluster == 1) {
      if (lane == 0) sums[warp] = mine;
    } else if (lane < kCluster) {
      Softmax* to = &sums[ptx::ClusterRank() * kWarps + warp];
      ptx::SendFloats(&to->shift, summed, lane, mine.shift, mine.sum);
    }
    const float scale = kGradient && !label.ignored ? *args.gradient_scale : 0.0f;
    if constexpr (kCluster == 1) {
      ptx::NamedBarrierSync(1, Plan::kThreads);
    } else {
      ptx::MbarrierWait(summed, turn / 2 % 2);
    }
    Softmax total;
    for (int i = lane; i < kCluster * kWarps; i += 32) Merge(total, sums[i]);
    total = WarpMerge(total);
    const float lse2 = total.shift + log2f(total.sum);
    const bool nobody_has_label = !label.exists && ptx::ClusterRank() == 0 && threadIdx.x == 0;
    if (label.own() || nobody_has_label)
      args.loss[row] = label.ignored ? 0.0f : lse2 * ptx::kLn2 - label_logit;

    if constexpr (kGradient) {
      WriteGradient(args.logits + row * args.stride + share.begin * kVec, shared, first_slot, share,
                    vocabulary, label, label_logit, lse2, scale);
    }
  }
  __syncwarp();
  ptx::ClusterSync();
}

}  // namespace ringleader::kernels::fused
