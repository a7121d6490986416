// The threshold of a top-p or top-k selection without a sort: histograms of ever finer bins.
#pragma once

#include <cooperative_groups.h>

#include <climits>
#include <cstdint>

namespace ringleader::kernels::index {

inline constexpr int kSelectThreads = 1024;

// Everything above `value` is taken, and the first `ties` of those equal to it; count and mass are
// of what is taken.
struct Threshold {
  int value;
  int ties;
  int equal;  // how many are equal to `value`
  int64_t count;
  int64_t mass;
  uint64_t above;  // CountAndMass of what lies above `value`
};

// kBins: of a histogram, a power of two from 256 on. Few elements are done faster with few.
template <int kBins>
struct SelectSharedOf {
  alignas(16) uint32_t count[kBins];  // of this block
  // A block by itself: masses; those of a head together stay below 2^31. A cluster: the counts of
  // all its blocks.
  alignas(16) uint32_t sum[kBins];
  uint64_t scan[32];
  uint64_t share;  // of this block of the cluster
  // The bin where the selection ends, and what lies in bins above it.
  int crossing;
  uint64_t above;
  uint64_t at_crossing;
};
using SelectShared = SelectSharedOf<4096>;
using SmallSelectShared = SelectSharedOf<256>;

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

__device__ constexpr int BitsOf(int power_of_two) {
  return power_of_two == 1 ? 0 : 1 + BitsOf(power_of_two / 2);
}

// The masses that a histogram of kBins looks at: `low` and up to `width` above it, 2^shift in a
// bin. The first is logarithmic, 2^kOctave bins an octave, so that the many small masses do not all
// meet in one bin; below 2^kOctave its bins are single values. Each that follows splits one bin of
// the one before, down to single values.
template <int kBins>
struct Window {
  static constexpr int kBits = BitsOf(kBins), kOctave = kBits - 5;
  int low = 1;
  uint32_t width = INT_MAX;
  int shift = 0;

  static __device__ __forceinline__ int LogarithmicBin(int mass) {
    if (mass < 1 << kOctave) return mass;
    const int above = 31 - __clz(mass) - kOctave;  // octaves after the single values
    return ((above + 1) << kOctave) + ((mass >> above) & ((1 << kOctave) - 1));
  }
  static __device__ __forceinline__ Window OfLogarithmicBin(int bin) {
    if (bin < 1 << kOctave) return {bin, 1, 0};
    const int bits = (bin >> kOctave) - 1, place = bin & ((1 << kOctave) - 1);
    return {((1 << kOctave) + place) << bits, 1u << bits, max(0, bits - kBits)};
  }
  __device__ __forceinline__ Window OfBin(int bin) const {
    return {low + (bin << shift), 1u << shift, max(0, shift - kBits)};
  }
};

// A count and a mass below 2^32 in one number, so that they are added and scanned together.
__device__ __forceinline__ uint64_t CountAndMass(uint32_t count, uint32_t mass) {
  return static_cast<uint64_t>(count) << 32 | mass;
}

// Counts the masses of this block's share [begin, end) that lie in `window` by bins: logarithmic
// ones in the first histogram, even ones in those that follow.
template <bool kMass, int kThreads, int kBins, typename MassOf, typename CostOf>
__device__ __forceinline__ void FillHistogram(SelectSharedOf<kBins>& shared, int begin, int end,
                                              MassOf mass_of, CostOf cost_of,
                                              const Window<kBins>& window, bool logarithmic) {
  for (int b = threadIdx.x; b < kBins; b += kThreads) {
    shared.count[b] = 0;
    if (kMass) shared.sum[b] = 0;
  }
  if (threadIdx.x == 0) shared.crossing = -1;
  __syncthreads();
#pragma unroll 4
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    const int mass = mass_of(i);
    const uint32_t offset = static_cast<uint32_t>(mass - window.low);
    if (offset >= window.width) continue;
    const int bin =
        logarithmic ? window.LogarithmicBin(mass) : static_cast<int>(offset >> window.shift);
    atomicAdd(&shared.count[bin], static_cast<uint32_t>(cost_of(i)));
    if (kMass) atomicAdd(&shared.sum[bin], static_cast<uint32_t>(mass));
  }
}

// Each block of the cluster adds up its share of the bins over all blocks and writes the counts to
// the `sum` of all.
template <int kCluster, int kThreads, int kBins>
__device__ __forceinline__ void SumOverCluster(SelectSharedOf<kBins>& shared) {
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  cluster.sync();
  constexpr int kShare = kBins / kCluster;
  for (int b = threadIdx.x; b < kShare; b += kThreads) {
    const int bin = static_cast<int>(cluster.block_rank()) * kShare + b;
    uint32_t sum = 0;
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank)
      sum += *cluster.map_shared_rank(&shared.count[bin], rank);
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank)
      *cluster.map_shared_rank(&shared.sum[bin], rank) = sum;
  }
  cluster.sync();
}

// Adds up bins from the top, after `above`, and leaves in `shared` the one in which `reached` comes
// true, if there is one. Returns the sum of all. `counts`: [kBins] of shared memory.
template <bool kMass, int kThreads, int kBins, typename Reached>
__device__ __forceinline__ uint64_t FindCrossing(SelectSharedOf<kBins>& shared,
                                                 const uint32_t* counts, uint64_t above,
                                                 Reached reached) {
  constexpr int kPerThread = kBins / kThreads;  // neighbours
  static_assert(kPerThread == 1 || kPerThread % 4 == 0);
  const int bottom = kBins - kPerThread * (1 + static_cast<int>(threadIdx.x));
  uint64_t of_bin[kPerThread], sum = 0;
  if constexpr (kPerThread == 1) {
    of_bin[0] = CountAndMass(counts[bottom], kMass ? shared.sum[bottom] : 0);
  } else {
#pragma unroll
    for (int four = 0; four < kPerThread; four += 4) {
      const uint4 c = *reinterpret_cast<const uint4*>(counts + bottom + four);
      const uint32_t count_of[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        of_bin[kPerThread - 1 - four - k] =
            CountAndMass(count_of[k], kMass ? shared.sum[bottom + four + k] : 0);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) sum += of_bin[k];
  const Scan scan = BlockScan(sum, shared.scan);
  uint64_t before = above + scan.inclusive - sum;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    if (of_bin[k] != 0 && !reached(before) && reached(before + of_bin[k])) {
      shared.crossing = bottom + kPerThread - 1 - k;
      shared.above = before;
      shared.at_crossing = of_bin[k];
    }
    before += of_bin[k];
  }
  __syncthreads();
  return above + scan.total;
}

// Finds where the elements of falling mass reach `mass_left` or `count_left`. `mass_of(i)`, for i
// of this block's share [begin, end), is 0 or less for what cannot be taken. kCluster blocks of
// kThreads share the work and all get the result; a cluster counts only, mass_left is ignored.
// Where an element counts for more than one (`cost_of`; all together below 2^31), which of those
// equal to the value are taken depends on their order: `ties`, `count` and `mass` then say nothing.
template <int kCluster, int kThreads, int kBins, typename MassOf, typename CostOf>
__device__ Threshold FindThreshold(SelectSharedOf<kBins>& shared, int begin, int end,
                                   MassOf mass_of, int64_t count_left, int64_t mass_left,
                                   CostOf cost_of) {
  constexpr bool kMass = kCluster == 1;
  if (count_left <= 0 || (kMass && mass_left <= 0)) return {INT_MAX, 0, 0, 0, 0, 0};
  const auto reached = [&](uint64_t taken) {
    return static_cast<int64_t>(taken >> 32) >= count_left ||
           (kMass && static_cast<int64_t>(taken & 0xffffffffu) >= mass_left);
  };
  Window<kBins> window;
  uint64_t above = 0;  // CountAndMass of what is taken with certainty
  for (int level = 0;; ++level) {
    FillHistogram<kMass, kThreads>(shared, begin, end, mass_of, cost_of, window, level == 0);
    if constexpr (kCluster > 1) {
      SumOverCluster<kCluster, kThreads>(shared);
    } else {
      __syncthreads();
    }
    const uint64_t all = FindCrossing<kMass, kThreads>(
        shared, kCluster > 1 ? shared.sum : shared.count, above, reached);
    const int crossing = shared.crossing;
    if (crossing < 0) {  // all of them together do not reach it
      return {0,  0, 0, static_cast<int64_t>(all >> 32), static_cast<int64_t>(all & 0xffffffffu),
              all};
    }
    above = shared.above;
    const uint64_t at_crossing = shared.at_crossing;
    const int equal = static_cast<int>(at_crossing >> 32);
    __syncthreads();
    window = level == 0 ? window.OfLogarithmicBin(crossing) : window.OfBin(crossing);
    if (kMass && equal == 1) {  // an element alone in its bin, whose mass is the bin's
      window = {static_cast<int>(at_crossing & 0xffffffffu), 1, 0};
    }
    if (window.width > 1) continue;
    const int value = window.low;
    const int64_t above_count = static_cast<int64_t>(above >> 32);
    const int64_t above_mass = static_cast<int64_t>(above & 0xffffffffu);
    int64_t ties = count_left - above_count;
    if (kMass) ties = min(ties, (mass_left - above_mass + value - 1) / value);
    ties = min(ties, static_cast<int64_t>(equal));
    return {value, static_cast<int>(ties), equal, above_count + ties, above_mass + ties * value,
            above};
  }
}

// Every element counts for one.
struct One {
  __device__ int operator()(int) const { return 1; }
};

}  // namespace ringleader::kernels::index
