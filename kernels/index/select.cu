#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/select.h"
#include "kernels/index/threshold.cuh"

namespace ringleader::kernels::index {
namespace {

namespace cg = cooperative_groups;
using fused::CheckPointer;
using fused::CheckSize;

constexpr int kCandidateCluster = 8;

// Masses that fit are kept in shared memory: they are looked at several times.
extern __shared__ int32_t cached[];
constexpr int kMaxCached = 45'056;  // 176 KiB, beside SelectShared

// Elements chosen: above the threshold << 32 | equal to it.
__device__ __forceinline__ uint64_t Choose(int key, const Threshold& threshold) {
  return static_cast<uint64_t>(key > threshold.value) << 32 |
         static_cast<uint64_t>(threshold.ties > 0 && key == threshold.value);
}
// How many of them come first: all that are above, and ties as long as there are any left.
__device__ __forceinline__ int Slots(uint64_t chosen, const Threshold& threshold) {
  return static_cast<int>(chosen >> 32) +
         min(static_cast<int>(chosen & 0xffffffffu), threshold.ties);
}

__global__ void __cluster_dims__(kCandidateCluster, 1, 1) __launch_bounds__(kSelectThreads)
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
    if (args.layout.Position(middle) < args.sink_tokens) {
      forced = middle + 1;
    } else {
      bound = middle;
    }
  }
  if (cache) {
#pragma unroll 8
    for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kSelectThreads) {
      cached[i - begin] = i < forced ? INT_MAX : mass[i];
    }
    __syncthreads();
  }
  const auto key_of = [&](int i) {
    return cache ? cached[i - begin] : i < forced ? INT_MAX : mass[i];
  };
  const Threshold threshold =
      FindThreshold<kCandidateCluster, false>(shared, begin, end, key_of, args.max_columns, 0);

  // Each warp has a run of neighbours, so that ties go to the lower positions: count, then write.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int run = (share + kSelectThreads - 1) / kSelectThreads * 32;
  const int first = min(end, begin + warp * run), last = min(end, first + run);
  uint64_t mine = 0;
  for (int i = first + lane; i < last; i += 32) mine += Choose(key_of(i), threshold);
  const Scan scan = BlockScan(mine, shared.scan);
  if (threadIdx.x == 0) shared.share = scan.total;
  cluster.sync();
  uint64_t before = 0;
  for (int rank = 0; rank < part; ++rank) before += *cluster.map_shared_rank(&shared.share, rank);
  cluster.sync();  // nobody leaves while its share is read
  // What comes before this warp's run.
  before += __shfl_sync(0xffffffffu, scan.inclusive - mine, 0);
  const uint32_t lanes_before = (1u << lane) - 1;
  for (int at = first; at < last; at += 32) {
    const int i = at + lane;
    const uint64_t choice = i < last ? Choose(key_of(i), threshold) : 0;
    const uint32_t above = __ballot_sync(0xffffffffu, (choice >> 32) != 0);
    const uint32_t equal = __ballot_sync(0xffffffffu, (choice & 1) != 0);
    const uint64_t ahead = before + (static_cast<uint64_t>(__popc(above & lanes_before)) << 32 |
                                     static_cast<uint64_t>(__popc(equal & lanes_before)));
    const bool tie_left = static_cast<int>(ahead & 0xffffffffu) < threshold.ties;
    if ((choice >> 32) != 0 || ((choice & 1) != 0 && tie_left)) {
      const int slot = Slots(ahead, threshold);
      out_mass[slot] = mass[i];
      out_position[slot] = static_cast<int32_t>(args.layout.Position(i));
    }
    before += static_cast<uint64_t>(__popc(above)) << 32 | static_cast<uint64_t>(__popc(equal));
  }
  for (int at = static_cast<int>(threshold.count) + part * kSelectThreads +
                static_cast<int>(threadIdx.x);
       at < args.max_columns; at += kCandidateCluster * kSelectThreads) {
    out_mass[at] = 0;
    out_position[at] = -1;
  }
}

// Calls emit(rank, position) for each set bit of the bitmap in ascending order. All threads call.
template <typename Emit>
__device__ void ScanBitmap(const uint32_t* bitmap, int words, uint64_t* slots, Emit emit) {
  int before = 0;
  for (int first = 0; first < words; first += kSelectThreads) {
    const int w = first + static_cast<int>(threadIdx.x);
    uint32_t bits = w < words ? __ldcg(bitmap + w) : 0;
    const Scan scan = BlockScan(static_cast<uint64_t>(__popc(bits)), slots);
    int rank = before + static_cast<int>(scan.inclusive) - __popc(bits);
    before += static_cast<int>(scan.total);
    for (; bits != 0; bits &= bits - 1) emit(rank++, w * 32 + __ffs(bits) - 1);
  }
}

// Columns of one head.
__device__ void SelectColumns(const SelectArgs& args, int head, int blocks, bool cache,
                              SelectShared& shared, int* last_tie) {
  const int candidates = args.layout.ranks * args.max_columns;
  const auto place = [&](int i) {
    const int rank = i / args.max_columns, slot = i % args.max_columns;
    return (static_cast<int64_t>(rank) * args.heads + head) * args.max_columns + slot;
  };
  const auto forced = [&](int position) { return position >= 0 && position < args.sink_tokens; };

  uint64_t total = 0, forced_sum = 0;  // the second: count << 32 | mass
  for (int b = threadIdx.x; b < blocks; b += kSelectThreads) {
    total += static_cast<uint64_t>(args.diagonal_mass[head * static_cast<int64_t>(blocks) + b]);
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < candidates; i += kSelectThreads) {
    const int64_t at = place(i);
    const bool is_forced = forced(args.candidate_positions[at]);
    const int mass = args.candidate_mass[at];
    if (is_forced) forced_sum += uint64_t{1} << 32 | static_cast<uint32_t>(mass);
    if (cache) cached[i] = is_forced ? 0 : mass;
  }
  total = BlockScan(total, shared.scan).total;
  forced_sum = BlockScan(forced_sum, shared.scan).total;
  const int64_t forced_count = static_cast<int64_t>(forced_sum >> 32);
  const int64_t forced_mass = static_cast<int64_t>(forced_sum & 0xffffffffu);
  const auto mass_of = [&](int i) {
    if (cache) return cached[i];
    return forced(args.candidate_positions[place(i)]) ? 0 : args.candidate_mass[place(i)];
  };
  const int64_t cap = min(args.column_budgets.max_count[head], args.max_columns);
  const Threshold threshold = FindThreshold<1, true>(
      shared, 0, candidates, mass_of, cap - forced_count,
      MassTarget(static_cast<int64_t>(total), args.column_budgets.mass[head]) - forced_mass);

  // A bitmap of the sequence sorts the positions, first of the ties, then of the choice.
  const int words = static_cast<int>((args.layout.tokens + 31) / 32);
  uint32_t* bitmap = static_cast<uint32_t*>(args.workspace) + static_cast<int64_t>(head) * words;
  const auto mark = [&](auto chosen) {
    for (int w = threadIdx.x; w < words; w += kSelectThreads) bitmap[w] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < candidates; i += kSelectThreads) {
      const int position = args.candidate_positions[place(i)];
      if (position >= 0 && chosen(position, mass_of(i))) {
        atomicOr(bitmap + position / 32, 1u << position % 32);
      }
    }
    __syncthreads();
  };
  if (threadIdx.x == 0) *last_tie = threshold.ties > 0 ? INT_MAX : -1;
  __syncthreads();
  if (threshold.ties > 0 && threshold.ties < threshold.equal) {
    mark([&](int, int mass) { return mass == threshold.value; });
    ScanBitmap(bitmap, words, shared.scan, [&](int rank, int position) {
      if (rank == threshold.ties - 1) *last_tie = position;
    });
    __syncthreads();
  }
  const int last = *last_tie;
  mark([&](int position, int mass) {
    return forced(position) || mass > threshold.value ||
           (mass == threshold.value && mass > 0 && position <= last);
  });
  int64_t* out = args.column_positions + static_cast<int64_t>(head) * args.max_columns;
  ScanBitmap(bitmap, words, shared.scan, [&](int rank, int position) { out[rank] = position; });
  const int count = static_cast<int>(forced_count + threshold.count);
  for (int at = count + static_cast<int>(threadIdx.x); at < args.max_columns;
       at += kSelectThreads) {
    out[at] = INT64_MAX;
  }
  if (threadIdx.x == 0) {
    args.column_counts[head] = count;
    args.masses[head].columns = forced_mass + threshold.mass;
  }
}

// Block diagonals of one head, as bits and by residue, and the tiles that they cost.
__device__ void SelectDiagonals(const SelectArgs& args, int head, int blocks,
                                SelectShared& shared) {
  const int32_t* mass = args.diagonal_mass + static_cast<int64_t>(head) * blocks;
  const int forced = min(blocks, args.local_blocks + 1), ranks = args.layout.ranks;
  uint64_t total = 0, forced_mass = 0;
  for (int b = threadIdx.x; b < blocks; b += kSelectThreads) {
    total += static_cast<uint64_t>(mass[b]);
    if (b < forced) forced_mass += static_cast<uint64_t>(mass[b]);
  }
  total = BlockScan(total, shared.scan).total;
  forced_mass = BlockScan(forced_mass, shared.scan).total;
  const auto mass_of = [&](int b) { return b < forced ? 0 : mass[b]; };
  const Threshold threshold = FindThreshold<1, true>(
      shared, 0, blocks, mass_of, args.diagonal_budgets.max_count[head] - forced,
      MassTarget(static_cast<int64_t>(total), args.diagonal_budgets.mass[head]) -
          static_cast<int64_t>(forced_mass));

  const int words = (blocks + 63) / 64;
  uint32_t* bits = reinterpret_cast<uint32_t*>(args.diagonals + static_cast<int64_t>(head) * words);
  int ties_before = 0;
  for (int first = 0; first < words * 64; first += kSelectThreads) {
    const int b = first + static_cast<int>(threadIdx.x);
    const int m = b < blocks ? mass_of(b) : 0;
    const bool equal = threshold.ties > 0 && m == threshold.value;
    const Scan ties = BlockScan(equal, shared.scan);
    const int tie = ties_before + static_cast<int>(ties.inclusive) - equal;
    ties_before += static_cast<int>(ties.total);
    const bool chosen = b < forced || m > threshold.value || (equal && tie < threshold.ties);
    const uint32_t word = __ballot_sync(0xffffffffu, chosen && b < blocks);
    if (threadIdx.x % 32 == 0 && b < words * 64) bits[b / 32] = word;
  }
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
  // A warp an owner.
  for (int owner = static_cast<int>(threadIdx.x) / 32; owner < ranks;
       owner += kSelectThreads / 32) {
    ShardLayout key = args.layout;
    key.rank = owner;
    int64_t tiles = 0;
    for (int at = threadIdx.x % 32; at < before; at += 32) {
      tiles += DiagonalTiles(args.layout, key, args.tile, residues[at]);
    }
    for (int lane = 16; lane > 0; lane /= 2) tiles += __shfl_xor_sync(0xffffffffu, tiles, lane);
    if (threadIdx.x % 32 == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(args.load) + owner,
                static_cast<unsigned long long>(tiles));
    }
  }
  if (threadIdx.x == 0) {
    offsets[ranks] = before;
    args.diagonal_counts[head] = before;
    args.masses[head].diagonals = static_cast<int64_t>(forced_mass) + threshold.mass;
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

// Shared memory to keep `elements` masses; none when they do not fit.
absl::Status CacheBytes(const void* kernel, int64_t elements, size_t* bytes) {
  *bytes = elements <= kMaxCached ? sizeof(int32_t) * static_cast<size_t>(elements) : 0;
  RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            sizeof(int32_t) * kMaxCached),
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
  RETURN_IF_ERROR(CheckPointer(args.mass, "SelectColumnCandidates: mass"));
  RETURN_IF_ERROR(CheckPointer(args.positions, "SelectColumnCandidates: positions"));
  size_t bytes = 0;
  const int64_t share = (args.layout.local_tokens() + kCandidateCluster - 1) / kCandidateCluster;
  RETURN_IF_ERROR(CacheBytes(reinterpret_cast<const void*>(CandidatesKernel), share, &bytes));
  CandidatesKernel<<<args.heads * kCandidateCluster, kSelectThreads, bytes, stream>>>(args,
                                                                                      bytes > 0);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SelectColumnCandidates");
  return absl::OkStatus();
}

size_t SelectWorkspaceBytes(int32_t heads, int64_t tokens) {
  return sizeof(uint32_t) * static_cast<size_t>(heads) * static_cast<size_t>((tokens + 31) / 32);
}

absl::Status Select(const SelectArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.heads, "Select: heads", 1, 4096));
  RETURN_IF_ERROR(CheckSize(args.layout.ranks, "Select: ranks", 1, 65536));
  RETURN_IF_ERROR(
      CheckSize(args.max_columns, "Select: max_columns", 1, INT32_MAX / args.layout.ranks));
  RETURN_IF_ERROR(CheckSize(args.sink_tokens, "Select: sink_tokens", 0, args.max_columns));
  RETURN_IF_ERROR(CheckSize(args.local_blocks, "Select: local_blocks", 0, 1 << 25));
  RETURN_IF_ERROR(CheckSize(args.layout.tokens, "Select: tokens", 1, INT32_MAX - 1024));
  RETURN_IF_ERROR(CheckSize(args.tile, "Select: tile", 64, 128, 64));
  RETURN_IF_ERROR(CheckBudgets(args.column_budgets, "Select: column_budgets"));
  RETURN_IF_ERROR(CheckBudgets(args.diagonal_budgets, "Select: diagonal_budgets"));
  RETURN_IF_ERROR(CheckPointer(args.candidate_mass, "Select: candidate_mass"));
  RETURN_IF_ERROR(CheckPointer(args.candidate_positions, "Select: candidate_positions"));
  RETURN_IF_ERROR(CheckPointer(args.diagonal_mass, "Select: diagonal_mass"));
  RETURN_IF_ERROR(CheckPointer(args.workspace, "Select: workspace"));
  RETURN_IF_ERROR(CheckPointer(args.column_positions, "Select: column_positions"));
  RETURN_IF_ERROR(CheckPointer(args.column_counts, "Select: column_counts"));
  RETURN_IF_ERROR(CheckPointer(args.diagonals, "Select: diagonals"));
  RETURN_IF_ERROR(CheckPointer(args.diagonal_counts, "Select: diagonal_counts"));
  RETURN_IF_ERROR(CheckPointer(args.residue_offsets, "Select: residue_offsets"));
  RETURN_IF_ERROR(CheckPointer(args.residues, "Select: residues"));
  RETURN_IF_ERROR(CheckPointer(args.load, "Select: load"));
  RETURN_IF_ERROR(CheckPointer(args.masses, "Select: masses"));
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(args.load, 0, sizeof(int64_t) * args.layout.ranks, stream),
                       "Select");
  size_t bytes = 0;
  RETURN_IF_ERROR(CacheBytes(reinterpret_cast<const void*>(SelectKernel),
                             int64_t{args.layout.ranks} * args.max_columns, &bytes));
  SelectKernel<<<2 * args.heads, kSelectThreads, bytes, stream>>>(
      args, static_cast<int>((args.layout.tokens + args.tile - 1) / args.tile), bytes > 0);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "Select");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
