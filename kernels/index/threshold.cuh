// The threshold of a top-p or top-k selection without a sort: histograms of ever finer bins.
#pragma once

#include <cooperative_groups.h>

#include <climits>
#include <cstdint>

namespace ringleader::kernels::index {

inline constexpr int kSelectThreads = 1024;
inline constexpr int kBins = 4096;

// Everything above `value` is taken, and the first `ties` of those equal to it; count and mass are
// of what is taken.
struct Threshold {
  int value;
  int ties;
  int equal;  // how many are equal to `value`
  int64_t count;
  int64_t mass;
};

struct SelectShared {
  uint32_t count[kBins];
  uint32_t mass[kBins];  // all masses of a head together stay below 2^31
  uint64_t scan[32];
  uint64_t share;  // of this block of the cluster
  // The bin where the selection ends, and what lies in bins above it.
  int crossing;
  uint64_t above;
  uint64_t at_crossing;
};

struct Scan {
  uint64_t inclusive;
  uint64_t total;
};

// Sums over the block of pairs of 32-bit sums; `slots` is shared memory for 32.
__device__ __forceinline__ Scan BlockScan(uint64_t value, uint64_t* slots) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += other;
  }
  if (lane == 31) slots[warp] = value;
  __syncthreads();
  // Every warp sums the sums of the warps for itself: shorter than a second barrier.
  const uint64_t of_warp = lane < static_cast<int>(blockDim.x) / 32 ? slots[lane] : 0;
  uint64_t before = lane < warp ? of_warp : 0, total = of_warp;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    before += __shfl_xor_sync(0xffffffffu, before, distance);
    total += __shfl_xor_sync(0xffffffffu, total, distance);
  }
  __syncthreads();  // slots may be used again
  return {before + value, total};
}

// Bins of a mass, coarse to fine. Level 0 is logarithmic, 128 bins an octave, so that the many
// small masses do not all meet in one bin; levels 1 and 2 split one of its bins down to single
// values.
struct Bins {
  int octave =
      0;          // the highest bit of the masses in the bin of level 0; below 7 its bins are exact
  int shift = 0;  // of level 1
  int bin0 = 0, bin1 = 0;

  static __device__ __forceinline__ int Level0(int mass) {
    if (mass < 128) return mass;
    const int octave = 31 - __clz(mass);
    return (octave - 6) * 128 + ((mass >> (octave - 7)) & 127);
  }
  __device__ __forceinline__ void Enter(int bin) {
    bin0 = bin;
    octave = bin < 128 ? 0 : bin / 128 + 6;
    shift = max(0, octave - 7 - 12);
  }
  __device__ __forceinline__ int low_bits() const { return max(0, octave - 7); }
  __device__ __forceinline__ int Level1(int mass) const {
    return (mass & ((1 << low_bits()) - 1)) >> shift;
  }
  __device__ __forceinline__ int Level2(int mass) const { return mass & ((1 << shift) - 1); }
  // The value of a bin of the last level that applies.
  __device__ __forceinline__ int Value(int bin1, int bin2) const {
    if (bin0 < 128) return bin0;
    return ((128 + bin0 % 128) << low_bits()) + (bin1 << shift) + bin2;
  }
};

// Finds where the elements of falling mass reach `mass_left` or `count_left`. `mass_of(i)`, for i
// of this block's share [begin, end), is 0 for what cannot be taken. kCluster blocks share the work
// and all get the result; kMass false ignores mass_left.
template <int kCluster, bool kMass, typename MassOf>
__device__ Threshold FindThreshold(SelectShared& shared, int begin, int end, MassOf mass_of,
                                   int64_t count_left, int64_t mass_left) {
  namespace cg = cooperative_groups;
  if (count_left <= 0 || (kMass && mass_left <= 0)) return {INT_MAX, 0, 0, 0, 0};
  const auto sync = [] {
    if constexpr (kCluster > 1) {
      cg::this_cluster().sync();
    } else {
      __syncthreads();
    }
  };
  int block = 0;
  if constexpr (kCluster > 1) block = static_cast<int>(cg::this_cluster().block_rank());
  const auto reached = [&](uint64_t taken) {
    return static_cast<int64_t>(taken >> 32) >= count_left ||
           (kMass && static_cast<int64_t>(taken & 0xffffffffu) >= mass_left);
  };
  Bins bins;
  uint64_t above = 0;  // (count, mass) taken with certainty
  for (int level = 0;; ++level) {
    for (int b = threadIdx.x; b < kBins; b += kSelectThreads) {
      shared.count[b] = 0;
      if (kMass) shared.mass[b] = 0;
    }
    if (threadIdx.x == 0) shared.crossing = -1;
    __syncthreads();
#pragma unroll 4
    for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kSelectThreads) {
      const int mass = mass_of(i);
      if (mass <= 0) continue;
      int bin = Bins::Level0(mass);
      if (level >= 1) {
        if (bin != bins.bin0) continue;
        bin = bins.Level1(mass);
      }
      if (level == 2) {
        if (bin != bins.bin1) continue;
        bin = bins.Level2(mass);
      }
      atomicAdd(&shared.count[bin], 1u);
      if (kMass) atomicAdd(&shared.mass[bin], static_cast<uint32_t>(mass));
    }
    sync();
    // Each block adds up its share of the bins, from the top; a thread has a few neighbours.
    constexpr int kShare = kBins / kCluster;
    constexpr int kPerThread = (kShare + kSelectThreads - 1) / kSelectThreads;
    const bool active = static_cast<int>(threadIdx.x) * kPerThread < kShare;
    const int top = kBins - 1 - block * kShare - static_cast<int>(threadIdx.x) * kPerThread;
    uint64_t of_bin[kPerThread] = {}, sum = 0;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      if (!active) continue;
      if constexpr (kCluster > 1) {
#pragma unroll
        for (int rank = 0; rank < kCluster; ++rank) {
          of_bin[k] += static_cast<uint64_t>(
                           *cg::this_cluster().map_shared_rank(&shared.count[top - k], rank))
                       << 32;
          if (kMass) of_bin[k] += *cg::this_cluster().map_shared_rank(&shared.mass[top - k], rank);
        }
      } else {
        of_bin[k] =
            static_cast<uint64_t>(shared.count[top - k]) << 32 | (kMass ? shared.mass[top - k] : 0);
      }
      sum += of_bin[k];
    }
    const Scan scan = BlockScan(sum, shared.scan);
    uint64_t before = above + scan.inclusive - sum, all = above + scan.total;
    if constexpr (kCluster > 1) {
      if (threadIdx.x == 0) shared.share = scan.total;
      sync();
      all = above;
      for (int rank = 0; rank < kCluster; ++rank) {
        const uint64_t share = *cg::this_cluster().map_shared_rank(&shared.share, rank);
        if (rank < block) before += share;
        all += share;
      }
    }
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      if (of_bin[k] != 0 && !reached(before) && reached(before + of_bin[k])) {
#pragma unroll
        for (int rank = 0; rank < kCluster; ++rank) {
          SelectShared* to = &shared;
          if constexpr (kCluster > 1) to = cg::this_cluster().map_shared_rank(&shared, rank);
          to->crossing = top - k;
          to->above = before;
          to->at_crossing = of_bin[k];
        }
      }
      before += of_bin[k];
    }
    sync();
    const int crossing = shared.crossing;
    if (crossing < 0) {  // all of them together do not reach it
      return {0, 0, 0, static_cast<int64_t>(all >> 32), static_cast<int64_t>(all & 0xffffffffu)};
    }
    above = shared.above;
    const int equal = static_cast<int>(shared.at_crossing >> 32);
    __syncthreads();
    if (level == 0) bins.Enter(crossing);
    if (level == 1) bins.bin1 = crossing;
    const bool exact = level == 0 ? bins.low_bits() == 0 : level == 1 ? bins.shift == 0 : true;
    if (!exact) continue;
    const int value = bins.Value(level >= 1 ? bins.bin1 : 0, level == 2 ? crossing : 0);
    const int64_t above_count = static_cast<int64_t>(above >> 32);
    const int64_t above_mass = static_cast<int64_t>(above & 0xffffffffu);
    int64_t ties = count_left - above_count;
    if (kMass) ties = min(ties, (mass_left - above_mass + value - 1) / value);
    ties = min(ties, static_cast<int64_t>(equal));
    return {value, static_cast<int>(ties), equal, above_count + ties, above_mass + ties * value};
  }
}

}  // namespace ringleader::kernels::index
