#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/diagonal_load.cuh"
#include "kernels/index/select.h"
#include "kernels/index/threshold.cuh"

namespace ringleader::kernels::index {
namespace {

namespace cg = cooperative_groups;
using fused::CheckPointer;
using fused::CheckSet;
using fused::CheckSize;

constexpr int kCandidateCluster = 8;
// Two blocks share a multiprocessor: with one on each, 16 clusters would not all fit.
constexpr int kCandidateThreads = 512;

// Beside SelectShared. Masses that fit are kept in it, as they are looked at several times; before
// them the bitmap of the chosen positions.
extern __shared__ __align__(16) uint32_t dynamic_shared[];
constexpr int64_t kDynamicBytes = 192 << 10;
// Longer sequences have their bitmap in device memory.
constexpr int64_t kMaxSharedBitmap = 128 << 10;

// A word for every 32 tokens, as many for each thread: a power of two.
__host__ __device__ constexpr int64_t BitmapBytes(int64_t tokens) {
  int64_t bytes = 4 * kSelectThreads;
  while (bytes * 8 < tokens) bytes *= 2;
  return bytes;
}

// layout.Position(i), without divisions of 64 bits.
__device__ __forceinline__ int PositionOf(const ShardLayout& layout, int i) {
  if (layout.ranks > 1 && layout.kind == LayoutKind::kStriped) {
    const uint32_t stripe = layout.stripe, turn = static_cast<uint32_t>(i) / stripe;
    return static_cast<int>((turn * layout.ranks + layout.rank) * stripe + (i - turn * stripe));
  }
  return static_cast<int>(layout.Position(i));
}

__global__ void __cluster_dims__(kCandidateCluster, 1, 1) __launch_bounds__(kCandidateThreads, 2)
    CandidatesKernel(const ColumnCandidatesArgs args, bool cache) {
  __shared__ SelectShared shared;
  cg::cluster_group cluster = cg::this_cluster();
  const int head = blockIdx.x / kCandidateCluster, part = cluster.block_rank();
  const int n = static_cast<int>(args.layout.local_tokens());
  const int share = (n + kCandidateCluster - 1) / kCandidateCluster;
  const int begin = min(n, part * share), end = min(n, begin + share);
  const int32_t* mass = args.column_mass + static_cast<int64_t>(head) * n;
  int32_t* out_mass = args.mass + static_cast<int64_t>(head) * args.max_columns;
  int32_t* out_position = args.positions + static_cast<int64_t>(head) * args.max_columns;
  // Positions grow with the local index, so the forced columns are the first ones.
  int forced = 0;
  for (int bound = min(n, args.sink_tokens); forced < bound;) {
    const int middle = (forced + bound) / 2;
    if (PositionOf(args.layout, middle) < args.sink_tokens) {
      forced = middle + 1;
    } else {
      bound = middle;
    }
  }
  if (cache) {
#pragma unroll 8
    for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kCandidateThreads) {
      dynamic_shared[i - begin] = i < forced ? INT_MAX : mass[i];
    }
    __syncthreads();
  }
  const auto key_of = [&](int i) {
    return cache ? static_cast<int>(dynamic_shared[i - begin]) : i < forced ? INT_MAX : mass[i];
  };
  const Threshold threshold = FindThreshold<kCandidateCluster, kCandidateThreads>(
      shared, begin, end, key_of, args.max_columns, 0, One());

  // Each warp has a run of neighbours, so that ties go by position: count, then write. Of the equal
  // ones the first `passed` are not taken.
  const int passed = TiesGoLate(head) ? threshold.equal - threshold.ties : 0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int run = (share + kCandidateThreads - 1) / kCandidateThreads * 32;
  const int first = min(end, begin + warp * run), last = min(end, first + run);
  const bool any_ties = threshold.ties > 0;
  uint32_t own_above = 0, own_equal = 0;
#pragma unroll 4
  for (int i = first + lane; i < last; i += 32) {
    const int key = key_of(i);
    own_above += key > threshold.value;
    own_equal += any_ties && key == threshold.value;
  }
  const Scan scan = BlockScan(static_cast<uint64_t>(own_above) << 32 | own_equal, shared.scan);
  if (threadIdx.x == 0) shared.share = scan.total;
  cluster.sync();
  uint64_t before = scan.inclusive - (static_cast<uint64_t>(own_above) << 32 | own_equal);
  for (int rank = 0; rank < part; ++rank) before += *cluster.map_shared_rank(&shared.share, rank);
  cluster.sync();                                // nobody leaves while its share is read
  before = __shfl_sync(0xffffffffu, before, 0);  // what comes before this warp's run
  int above_before = static_cast<int>(before >> 32);
  int equal_before = static_cast<int>(before & 0xffffffffu);
  const uint32_t lanes_before = (1u << lane) - 1;
#pragma unroll 2
  for (int at = first; at < last; at += 32) {
    const int i = at + lane, key = i < last ? key_of(i) : 0;
    const bool is_above = i < last && key > threshold.value;
    const bool is_equal = i < last && any_ties && key == threshold.value;
    const uint32_t above = __ballot_sync(0xffffffffu, is_above);
    const uint32_t equal = __ballot_sync(0xffffffffu, is_equal);
    const int equal_ahead = equal_before + __popc(equal & lanes_before);
    const int ties_ahead = max(0, min(equal_ahead - passed, threshold.ties));
    if (is_above || (is_equal && equal_ahead >= passed && equal_ahead - passed < threshold.ties)) {
      const int slot = above_before + __popc(above & lanes_before) + ties_ahead;
      out_mass[slot] = i < forced ? mass[i] : key;
      out_position[slot] = PositionOf(args.layout, i);
    }
    above_before += __popc(above);
    equal_before += __popc(equal);
  }
  for (int at = static_cast<int>(threshold.count) + part * kCandidateThreads +
                static_cast<int>(threadIdx.x);
       at < args.max_columns; at += kCandidateCluster * kCandidateThreads) {
    out_mass[at] = 0;
    out_position[at] = -1;
  }
}

// A bitmap of the sequence sorts positions. Thread t ranks the bits of 2^shift words in a row, from
// word t << shift on, which lie kSelectThreads apart in memory.
class Bitmap {
 public:
  __device__ Bitmap(uint32_t* words, int64_t tokens) : words_(words) {
    const int a_thread = static_cast<int>((tokens - 1) / (32 * kSelectThreads));
    shift_ = 32 - __clz(a_thread);
  }
  __device__ void Clear() const {
    for (int k = 0; k < 1 << shift_; ++k) words_[k * kSelectThreads + threadIdx.x] = 0;
  }
  __device__ void Mark(int position) const {
    const int word = position / 32, k = word & ((1 << shift_) - 1);
    atomicOr(words_ + k * kSelectThreads + (word >> shift_), 1u << position % 32);
  }
  // Calls emit(rank, position) for each bit in ascending order. All threads call, after a barrier.
  template <typename Emit>
  __device__ void Scan(uint64_t* slots, Emit emit) const {
    uint32_t own = 0;
    for (int k = 0; k < 1 << shift_; ++k) own += __popc(Word(k));
    int rank = static_cast<int>(BlockScan(own, slots).inclusive - own);
    for (int k = 0; k < 1 << shift_; ++k) {
      const int first = ((static_cast<int>(threadIdx.x) << shift_) + k) * 32;
      for (uint32_t bits = Word(k); bits != 0; bits &= bits - 1)
        emit(rank++, first + __ffs(bits) - 1);
    }
  }

 private:
  // Reads device memory past the first-level cache, where atomics do not show.
  __device__ uint32_t Word(int k) const {
    return *static_cast<const volatile uint32_t*>(words_ + k * kSelectThreads + threadIdx.x);
  }
  uint32_t* words_;
  int shift_;
};

// Calls visit(i, position, mass) for the candidates i of a head. Loads are issued in batches, and
// divisions by max_columns stay out of the loop.
template <typename Visit>
__device__ __forceinline__ void ForCandidates(const SelectArgs& args, int head, Visit visit) {
  constexpr int kBatch = 8;
  const int columns = args.max_columns, candidates = args.layout.ranks * columns;
  const int64_t next_rank = args.next_rank();
  const int rank_step = kSelectThreads / columns, slot_step = kSelectThreads % columns;
  int slot = static_cast<int>(threadIdx.x) % columns;
  int64_t base =
      static_cast<int>(threadIdx.x) / columns * next_rank + static_cast<int64_t>(head) * columns;
  for (int i = threadIdx.x; i < candidates; i += kBatch * kSelectThreads) {
    int position[kBatch], mass[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (i + j * kSelectThreads >= candidates) break;
      position[j] = __ldg(args.candidate_positions + base + slot);
      mass[j] = __ldg(args.candidate_mass + base + slot);
      slot += slot_step;
      base += rank_step * next_rank;
      if (slot >= columns) {
        slot -= columns;
        base += next_rank;
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (i + j * kSelectThreads < candidates) visit(i + j * kSelectThreads, position[j], mass[j]);
    }
  }
}

// Chooses the columns of one head.
__device__ void SelectColumns(const SelectArgs& args, int head, int blocks, bool cache,
                              SelectShared& shared, int* last_tie) {
  const int candidates = args.layout.ranks * args.max_columns;
  const int64_t words = BitmapBytes(args.layout.tokens) / 4;
  const bool shared_bitmap = 4 * words <= kMaxSharedBitmap;
  const Bitmap bitmap(
      shared_bitmap ? dynamic_shared : static_cast<uint32_t*>(args.workspace) + head * words,
      args.layout.tokens);
  int32_t* cached = reinterpret_cast<int32_t*>(dynamic_shared) + (shared_bitmap ? words : 0);
  const auto forced = [&](int position) { return position >= 0 && position < args.sink_tokens; };

  uint64_t total = 0, forced_sum = 0;  // the second: count << 32 | mass
  for (int b = threadIdx.x; b < blocks; b += kSelectThreads) {
    total += static_cast<uint64_t>(args.diagonal_mass[head * static_cast<int64_t>(blocks) + b]);
  }
  ForCandidates(args, head, [&](int i, int position, int mass) {
    if (forced(position)) forced_sum += uint64_t{1} << 32 | static_cast<uint32_t>(mass);
    if (cache) cached[i] = forced(position) ? 0 : mass;
  });
  total = BlockScan(total, shared.scan).total;
  forced_sum = BlockScan(forced_sum, shared.scan).total;
  const int64_t forced_count = static_cast<int64_t>(forced_sum >> 32);
  const int64_t forced_mass = static_cast<int64_t>(forced_sum & 0xffffffffu);
  const auto mass_of = [&](int i) {
    if (cache) return cached[i];
    const int rank = i / args.max_columns, slot = i % args.max_columns;
    const int64_t at =
        rank * args.next_rank() + static_cast<int64_t>(head) * args.max_columns + slot;
    return forced(args.candidate_positions[at]) ? 0 : args.candidate_mass[at];
  };
  const int64_t cap = min(args.column_budgets.max_count[head], args.max_columns);
  const int64_t target = MassTarget(static_cast<int64_t>(total), args.column_budgets.mass[head]);
  const Threshold threshold = FindThreshold<1, kSelectThreads>(
      shared, 0, candidates, mass_of, cap - forced_count, target - forced_mass, One());

  // Marks positions: first those of ties, if not all of them are taken, then the choice.
  const auto mark = [&](auto chosen) {
    bitmap.Clear();
    __syncthreads();
    ForCandidates(args, head, [&](int, int position, int mass) {
      if (position >= 0 && chosen(position, mass)) bitmap.Mark(position);
    });
    __syncthreads();
  };
  const bool late = TiesGoLate(head);
  if (threadIdx.x == 0) *last_tie = (threshold.ties > 0) == late ? -1 : INT_MAX;
  __syncthreads();
  if (threshold.ties > 0 && threshold.ties < threshold.equal) {
    mark([&](int position, int mass) { return !forced(position) && mass == threshold.value; });
    const int last_rank = late ? threshold.equal - threshold.ties : threshold.ties - 1;
    bitmap.Scan(shared.scan, [&](int rank, int position) {
      if (rank == last_rank) *last_tie = position;
    });
    __syncthreads();
  }
  const int last = *last_tie;
  mark([&](int position, int mass) {
    return forced(position) || mass > threshold.value ||
           (mass == threshold.value && mass > 0 && (late ? position >= last : position <= last));
  });
  int64_t* out = args.column_positions + static_cast<int64_t>(head) * args.max_columns;
  bitmap.Scan(shared.scan, [&](int rank, int position) { out[rank] = position; });
  const int count = static_cast<int>(forced_count + threshold.count);
  for (int at = count + static_cast<int>(threadIdx.x); at < args.max_columns;
       at += kSelectThreads) {
    out[at] = INT64_MAX;
  }
  if (threadIdx.x == 0) {
    args.column_counts[head] = count;
    const int64_t mass = forced_mass + threshold.mass;
    args.masses[head].columns = mass;
    args.masses[head].columns_at_budget = count >= cap && mass < target;
  }
}

// Chooses the block diagonals of one head, writes them as bits and by residue, and adds the tiles
// that they cost to the load.
__device__ void SelectDiagonals(const SelectArgs& args, int head, int blocks,
                                SelectShared& shared) {
  const int32_t* mass = args.diagonal_mass + static_cast<int64_t>(head) * blocks;
  const int forced = min(blocks, args.local_blocks + 1), ranks = args.layout.ranks;
  const int64_t content_blocks = args.content_blocks();
  const auto cost_of = [&](int b) {
    return DiagonalCost(args.diagonals_by_tiles, content_blocks, b);
  };
  uint64_t total = 0, forced_sum = 0;  // the second: CountAndMass
  for (int b = threadIdx.x; b < blocks; b += kSelectThreads) {
    total += static_cast<uint64_t>(mass[b]);
    if (b < forced) forced_sum += CountAndMass(cost_of(b), mass[b]);
  }
  total = BlockScan(total, shared.scan).total;
  forced_sum = BlockScan(forced_sum, shared.scan).total;
  const auto mass_of = [&](int b) { return b < forced ? 0 : mass[b]; };
  const int64_t cap = args.diagonal_budgets.max_count[head],
                target = MassTarget(static_cast<int64_t>(total), args.diagonal_budgets.mass[head]),
                cost_left = cap - static_cast<int64_t>(forced_sum >> 32),
                mass_left = target - static_cast<int64_t>(forced_sum & 0xffffffffu);
  const Threshold threshold =
      FindThreshold<1, kSelectThreads>(shared, 0, blocks, mass_of, cost_left, mass_left, cost_of);

  const int words = (blocks + 63) / 64;
  uint32_t* bits = reinterpret_cast<uint32_t*>(args.diagonals + static_cast<int64_t>(head) * words);
  uint64_t ahead = threshold.above;  // of the next equal to the threshold
  uint64_t taken = 0;
  for (int first = 0; first < words * 64; first += kSelectThreads) {
    const int b = first + static_cast<int>(threadIdx.x);
    const int m = b < blocks ? mass_of(b) : 0;
    const uint64_t own = m > 0 ? CountAndMass(cost_of(b), m) : 0;
    const uint64_t equal = m == threshold.value ? own : 0;
    const Scan ties = BlockScan(equal, shared.scan);
    const uint64_t before = ahead + ties.inclusive - equal;
    ahead += ties.total;
    const bool above = m > threshold.value,
               tie = equal != 0 && static_cast<int64_t>(before >> 32) < cost_left &&
                     static_cast<int64_t>(before & 0xffffffffu) < mass_left;
    if (above || tie) taken += own;
    const uint32_t word = __ballot_sync(0xffffffffu, b < blocks && (b < forced || above || tie));
    if (threadIdx.x % 32 == 0 && b < words * 64) bits[b / 32] = word;
  }
  taken = forced_sum + BlockScan(taken, shared.scan).total;
  __syncthreads();
  // Entry i of the order by residue is diagonal residue + ranks * (i % of_residue).
  const int of_residue = (blocks + ranks - 1) / ranks;
  int32_t* residues = args.residues + static_cast<int64_t>(head) * blocks;
  int32_t* offsets = args.residue_offsets + static_cast<int64_t>(head) * (ranks + 1);
  int before = 0;
  for (int first = 0; first < of_residue * ranks; first += kSelectThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int residue = i / of_residue, b = residue + i % of_residue * ranks;
    const bool chosen = residue < ranks && b < blocks && (bits[b / 32] >> b % 32 & 1) != 0;
    const Scan scan = BlockScan(chosen, shared.scan);
    const int at = before + static_cast<int>(scan.inclusive) - chosen;
    before += static_cast<int>(scan.total);
    if (residue < ranks && i % of_residue == 0) offsets[residue] = at;
    if (chosen) residues[at] = b;
  }
  __syncthreads();
  AddLoad(args.layout, args.tile, blocks, residues, before, shared, args.load);
  if (threadIdx.x == 0) {
    offsets[ranks] = before;
    args.diagonal_counts[head] = before;
    const int64_t covered = static_cast<int64_t>(taken & 0xffffffffu);
    args.masses[head].diagonals = covered;
    args.masses[head].diagonals_at_budget =
        static_cast<int64_t>(taken >> 32) >= cap && covered < target;
    args.masses[head].total = static_cast<int64_t>(total);
  }
}

// Two blocks a head: one for its columns, one for its diagonals.
__global__ void __launch_bounds__(kSelectThreads)
    SelectKernel(const SelectArgs args, int blocks, bool cache) {
  __shared__ SelectShared shared;
  __shared__ int last_tie;
  const int head = blockIdx.x / 2;
  if (blockIdx.x % 2 == 0) {
    SelectColumns(args, head, blocks, cache, shared, &last_tie);
  } else {
    SelectDiagonals(args, head, blocks, shared);
  }
}

// Shared memory beside the `used` bytes to keep `elements` masses; only `used` when they do not
// fit.
absl::Status CacheBytes(const void* kernel, int64_t used, int64_t elements, size_t* bytes,
                        bool* cache) {
  const int64_t masses = static_cast<int64_t>(sizeof(int32_t)) * elements;
  *cache = used + masses <= kDynamicBytes;
  *bytes = static_cast<size_t>(*cache ? used + masses : used);
  RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(kDynamicBytes)),
                       "selection: shared memory");
  return absl::OkStatus();
}

absl::Status CheckBudgets(const HeadBudgets& budgets, const char* step) {
  if (budgets.mass == nullptr || budgets.max_count == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: mass and max_count must both be set", step));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SelectColumnCandidates(const ColumnCandidatesArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.heads, "SelectColumnCandidates: heads", 1, 4096));
  RETURN_IF_ERROR(CheckSize(args.max_columns, "SelectColumnCandidates: max_columns", 1, 1 << 20));
  RETURN_IF_ERROR(
      CheckSize(args.sink_tokens, "SelectColumnCandidates: sink_tokens", 0, args.max_columns));
  RETURN_IF_ERROR(
      CheckSize(args.layout.tokens, "SelectColumnCandidates: tokens", 1, INT32_MAX - 1024));
  RETURN_IF_ERROR(CheckPointer(args.column_mass, "SelectColumnCandidates: column_mass"));
  RETURN_IF_ERROR(CheckSet(args.mass, "SelectColumnCandidates: mass"));
  RETURN_IF_ERROR(CheckSet(args.positions, "SelectColumnCandidates: positions"));
  size_t bytes = 0;
  const int64_t share = (args.layout.local_tokens() + kCandidateCluster - 1) / kCandidateCluster;
  bool cache = false;
  RETURN_IF_ERROR(
      CacheBytes(reinterpret_cast<const void*>(CandidatesKernel), 0, share, &bytes, &cache));
  CandidatesKernel<<<args.heads * kCandidateCluster, kCandidateThreads, bytes, stream>>>(args,
                                                                                         cache);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SelectColumnCandidates");
  return absl::OkStatus();
}

size_t SelectWorkspaceBytes(int32_t heads, int64_t tokens) {
  const int64_t bytes = BitmapBytes(tokens);
  return bytes <= kMaxSharedBitmap ? 0 : static_cast<size_t>(heads) * static_cast<size_t>(bytes);
}

absl::Status Select(const SelectArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.heads, "Select: heads", 1, 4096));
  RETURN_IF_ERROR(CheckSize(args.layout.ranks, "Select: ranks", 1, 65536));
  RETURN_IF_ERROR(CheckSize(args.max_columns, "Select: max_columns", 1,
                            (INT32_MAX - 65536) / args.layout.ranks));
  RETURN_IF_ERROR(CheckSize(args.sink_tokens, "Select: sink_tokens", 0, args.max_columns));
  RETURN_IF_ERROR(CheckSize(args.local_blocks, "Select: local_blocks", 0, 1 << 25));
  RETURN_IF_ERROR(CheckSize(args.layout.tokens, "Select: tokens", 1, INT32_MAX - 1024));
  RETURN_IF_ERROR(CheckSize(args.tile, "Select: tile", 64, 128, 64));
  RETURN_IF_ERROR(CheckBudgets(args.column_budgets, "Select: column_budgets"));
  RETURN_IF_ERROR(CheckBudgets(args.diagonal_budgets, "Select: diagonal_budgets"));
  RETURN_IF_ERROR(CheckSet(args.candidate_mass, "Select: candidate_mass"));
  RETURN_IF_ERROR(CheckSet(args.candidate_positions, "Select: candidate_positions"));
  RETURN_IF_ERROR(CheckPointer(args.diagonal_mass, "Select: diagonal_mass"));
  if (SelectWorkspaceBytes(args.heads, args.layout.tokens) > 0) {
    RETURN_IF_ERROR(CheckPointer(args.workspace, "Select: workspace"));
  }
  RETURN_IF_ERROR(CheckPointer(args.column_positions, "Select: column_positions"));
  RETURN_IF_ERROR(CheckPointer(args.column_counts, "Select: column_counts"));
  RETURN_IF_ERROR(CheckPointer(args.diagonals, "Select: diagonals"));
  RETURN_IF_ERROR(CheckPointer(args.diagonal_counts, "Select: diagonal_counts"));
  RETURN_IF_ERROR(CheckPointer(args.residue_offsets, "Select: residue_offsets"));
  RETURN_IF_ERROR(CheckPointer(args.residues, "Select: residues"));
  if (args.load == nullptr) return absl::InvalidArgumentError("Select: load is null");
  RETURN_IF_ERROR(CheckPointer(args.masses, "Select: masses"));
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(args.load, 0, sizeof(int64_t) * args.layout.ranks, stream),
                       "Select");
  const int64_t bitmap = BitmapBytes(args.layout.tokens);
  size_t bytes = 0;
  bool cache = false;
  RETURN_IF_ERROR(CacheBytes(reinterpret_cast<const void*>(SelectKernel),
                             bitmap <= kMaxSharedBitmap ? bitmap : 0,
                             int64_t{args.layout.ranks} * args.max_columns, &bytes, &cache));
  SelectKernel<<<2 * args.heads, kSelectThreads, bytes, stream>>>(
      args, static_cast<int>((args.layout.tokens + args.tile - 1) / args.tile), cache);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "Select");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
