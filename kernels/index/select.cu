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
constexpr int kLoadThreads = 64;

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

__global__ void __launch_bounds__(kSelectThreads)
    SelectColumnsKernel(const SelectColumnsArgs args, int blocks, bool cache) {
  __shared__ SelectShared shared;
  __shared__ int last_tie;
  const int head = blockIdx.x;
  const int candidates = args.ranks * args.max_columns;
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
    const bool is_forced = forced(args.positions[at]);
    const int mass = args.mass[at];
    if (is_forced) forced_sum += uint64_t{1} << 32 | static_cast<uint32_t>(mass);
    if (cache) cached[i] = is_forced ? 0 : mass;
  }
  total = BlockScan(total, shared.scan).total;
  forced_sum = BlockScan(forced_sum, shared.scan).total;
  const int64_t forced_count = static_cast<int64_t>(forced_sum >> 32);
  const int64_t forced_mass = static_cast<int64_t>(forced_sum & 0xffffffffu);
  const auto mass_of = [&](int i) {
    if (cache) return cached[i];
    return forced(args.positions[place(i)]) ? 0 : args.mass[place(i)];
  };
  const int64_t cap = min(args.budgets.max_count[head], args.max_columns);
  const Threshold threshold = FindThreshold<1, true>(
      shared, 0, candidates, mass_of, cap - forced_count,
      MassTarget(static_cast<int64_t>(total), args.budgets.mass[head]) - forced_mass);

  // A bitmap of the sequence sorts the positions, first of the ties, then of the choice.
  const int words = static_cast<int>((args.tokens + 31) / 32);
  uint32_t* bitmap = static_cast<uint32_t*>(args.workspace) + static_cast<int64_t>(head) * words;
  const auto mark = [&](auto chosen) {
    for (int w = threadIdx.x; w < words; w += kSelectThreads) bitmap[w] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < candidates; i += kSelectThreads) {
      const int position = args.positions[place(i)];
      if (position >= 0 && chosen(position, mass_of(i))) {
        atomicOr(bitmap + position / 32, 1u << position % 32);
      }
    }
    __syncthreads();
  };
  if (threadIdx.x == 0) last_tie = threshold.ties > 0 ? INT_MAX : -1;
  __syncthreads();
  if (threshold.ties > 0 && threshold.ties < threshold.equal) {
    mark([&](int, int mass) { return mass == threshold.value; });
    ScanBitmap(bitmap, words, shared.scan, [&](int rank, int position) {
      if (rank == threshold.ties - 1) last_tie = position;
    });
    __syncthreads();
  }
  const int last = last_tie;
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
    args.counts[head] = count;
    args.kept_mass[head] = forced_mass + threshold.mass;
  }
}

__global__ void __launch_bounds__(kSelectThreads)
    SelectDiagonalsKernel(const SelectDiagonalsArgs args) {
  __shared__ SelectShared shared;
  const int head = blockIdx.x, blocks = args.blocks;
  const int32_t* mass = args.diagonal_mass + static_cast<int64_t>(head) * blocks;
  const int forced = min(blocks, args.local_blocks + 1);
  uint64_t total = 0, forced_mass = 0;
  for (int b = threadIdx.x; b < blocks; b += kSelectThreads) {
    total += static_cast<uint64_t>(mass[b]);
    if (b < forced) forced_mass += static_cast<uint64_t>(mass[b]);
  }
  total = BlockScan(total, shared.scan).total;
  forced_mass = BlockScan(forced_mass, shared.scan).total;
  const auto mass_of = [&](int b) { return b < forced ? 0 : mass[b]; };
  const Threshold threshold =
      FindThreshold<1, true>(shared, 0, blocks, mass_of, args.budgets.max_count[head] - forced,
                             MassTarget(static_cast<int64_t>(total), args.budgets.mass[head]) -
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
  const int of_residue = (blocks + args.ranks - 1) / args.ranks;
  int32_t* residues = args.residues + static_cast<int64_t>(head) * blocks;
  int32_t* offsets = args.residue_offsets + static_cast<int64_t>(head) * (args.ranks + 1);
  int before = 0;
  for (int first = 0; first < of_residue * args.ranks; first += kSelectThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int residue = i / of_residue, b = residue + i % of_residue * args.ranks;
    const bool chosen = residue < args.ranks && b < blocks && (bits[b / 32] >> b % 32 & 1) != 0;
    const Scan scan = BlockScan(chosen, shared.scan);
    const int at = before + static_cast<int>(scan.inclusive) - chosen;
    before += static_cast<int>(scan.total);
    if (residue < args.ranks && i % of_residue == 0) offsets[residue] = at;
    if (chosen) residues[at] = b;
  }
  if (threadIdx.x == 0) {
    offsets[args.ranks] = before;
    args.counts[head] = before;
    args.kept_mass[head] = static_cast<int64_t>(forced_mass) + threshold.mass;
    args.total_mass[head] = static_cast<int64_t>(total);
  }
}

__global__ void DiagonalLoadKernel(const DiagonalLoadArgs args, int words) {
  ShardLayout query = args.layout, key = args.layout;
  query.rank = args.first_rank + static_cast<int>(blockIdx.x) / args.layout.ranks;
  key.rank = static_cast<int>(blockIdx.x) % args.layout.ranks;
  const uint64_t* diagonals = args.diagonals + static_cast<int64_t>(blockIdx.y) * words;
  int64_t tiles = 0;
  for (int word = threadIdx.x; word < words; word += kLoadThreads) {
    for (uint64_t bits = diagonals[word]; bits != 0; bits &= bits - 1) {
      const int bit = __ffsll(static_cast<long long>(bits)) - 1;
      tiles += DiagonalTiles(query, key, args.tile, int64_t{word} * 64 + bit);
    }
  }
  __shared__ uint64_t slots[32];
  const Scan scan = BlockScan(static_cast<uint64_t>(tiles), slots);
  if (threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(args.load) + blockIdx.x, scan.total);
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
        absl::StrFormat("%s: budgets.mass and budgets.max_count must both be set", step));
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

size_t SelectColumnsWorkspaceBytes(int32_t heads, int64_t tokens) {
  return sizeof(uint32_t) * static_cast<size_t>(heads) * static_cast<size_t>((tokens + 31) / 32);
}

absl::Status SelectColumns(const SelectColumnsArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.heads, "SelectColumns: heads", 1, 4096));
  RETURN_IF_ERROR(CheckSize(args.ranks, "SelectColumns: ranks", 1, 65536));
  RETURN_IF_ERROR(
      CheckSize(args.max_columns, "SelectColumns: max_columns", 1, INT32_MAX / args.ranks));
  RETURN_IF_ERROR(CheckSize(args.sink_tokens, "SelectColumns: sink_tokens", 0, args.max_columns));
  RETURN_IF_ERROR(CheckSize(args.tokens, "SelectColumns: tokens", 1, INT32_MAX - 1024));
  RETURN_IF_ERROR(CheckSize(args.tile, "SelectColumns: tile", 64, 128, 64));
  RETURN_IF_ERROR(CheckBudgets(args.budgets, "SelectColumns"));
  RETURN_IF_ERROR(CheckPointer(args.mass, "SelectColumns: mass"));
  RETURN_IF_ERROR(CheckPointer(args.positions, "SelectColumns: positions"));
  RETURN_IF_ERROR(CheckPointer(args.diagonal_mass, "SelectColumns: diagonal_mass"));
  RETURN_IF_ERROR(CheckPointer(args.workspace, "SelectColumns: workspace"));
  RETURN_IF_ERROR(CheckPointer(args.column_positions, "SelectColumns: column_positions"));
  RETURN_IF_ERROR(CheckPointer(args.counts, "SelectColumns: counts"));
  RETURN_IF_ERROR(CheckPointer(args.kept_mass, "SelectColumns: kept_mass"));
  size_t bytes = 0;
  RETURN_IF_ERROR(CacheBytes(reinterpret_cast<const void*>(SelectColumnsKernel),
                             int64_t{args.ranks} * args.max_columns, &bytes));
  SelectColumnsKernel<<<args.heads, kSelectThreads, bytes, stream>>>(
      args, static_cast<int>((args.tokens + args.tile - 1) / args.tile), bytes > 0);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SelectColumns");
  return absl::OkStatus();
}

absl::Status SelectDiagonals(const SelectDiagonalsArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.heads, "SelectDiagonals: heads", 1, 4096));
  RETURN_IF_ERROR(CheckSize(args.blocks, "SelectDiagonals: blocks", 1, 1 << 25));
  RETURN_IF_ERROR(CheckSize(args.ranks, "SelectDiagonals: ranks", 1, 65536));
  RETURN_IF_ERROR(CheckSize(args.local_blocks, "SelectDiagonals: local_blocks", 0, 1 << 25));
  RETURN_IF_ERROR(CheckBudgets(args.budgets, "SelectDiagonals"));
  RETURN_IF_ERROR(CheckPointer(args.diagonal_mass, "SelectDiagonals: diagonal_mass"));
  RETURN_IF_ERROR(CheckPointer(args.diagonals, "SelectDiagonals: diagonals"));
  RETURN_IF_ERROR(CheckPointer(args.counts, "SelectDiagonals: counts"));
  RETURN_IF_ERROR(CheckPointer(args.kept_mass, "SelectDiagonals: kept_mass"));
  RETURN_IF_ERROR(CheckPointer(args.total_mass, "SelectDiagonals: total_mass"));
  RETURN_IF_ERROR(CheckPointer(args.residue_offsets, "SelectDiagonals: residue_offsets"));
  RETURN_IF_ERROR(CheckPointer(args.residues, "SelectDiagonals: residues"));
  SelectDiagonalsKernel<<<args.heads, kSelectThreads, 0, stream>>>(args);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SelectDiagonals");
  return absl::OkStatus();
}

absl::Status DiagonalLoad(const DiagonalLoadArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.heads, "DiagonalLoad: heads", 1, 4096));
  RETURN_IF_ERROR(CheckSize(args.first_rank, "DiagonalLoad: first_rank", 0, args.layout.ranks - 1));
  RETURN_IF_ERROR(CheckSize(args.rank_count, "DiagonalLoad: rank_count", 1,
                            args.layout.ranks - args.first_rank));
  RETURN_IF_ERROR(CheckSize(args.tile, "DiagonalLoad: tile", 64, 128, 64));
  RETURN_IF_ERROR(CheckPointer(args.diagonals, "DiagonalLoad: diagonals"));
  RETURN_IF_ERROR(CheckPointer(args.load, "DiagonalLoad: load"));
  const int64_t blocks = (args.layout.tokens + args.tile - 1) / args.tile;
  const int pairs = args.rank_count * args.layout.ranks;
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(args.load, 0, sizeof(int64_t) * pairs, stream),
                       "DiagonalLoad");
  DiagonalLoadKernel<<<dim3(pairs, args.heads), kLoadThreads, 0, stream>>>(
      args, static_cast<int>((blocks + 63) / 64));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "DiagonalLoad");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
