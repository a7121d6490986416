#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/between_ranks.h"
#include "kernels/sm90/walk/find_column.cuh"
#include "ringleader/kernels/block_mass.h"

namespace ringleader::kernels::index {
namespace {

constexpr int kThreads = 256;
constexpr int32_t kPartCandidates = kThreads;  // of columns, whose masses a block counts

unsigned Blocks(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

absl::Status Launched(const char* what) {
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), what);
  return absl::OkStatus();
}

// A block an estimate query.
__global__ void PrepareEstimateKernel(const EstimateInputsArgs args) {
  const int32_t query = blockIdx.x;
  const int64_t position = args.chosen != nullptr ? args.chosen[query]
                           : args.spread ? SpreadPosition(args.layout.tokens, args.count, query)
                                         : args.layout.tokens - args.count + query;
  if (threadIdx.x == 0) args.positions[query] = position;
  if (query == 0) {
    for (int32_t head = threadIdx.x; head < args.q.heads; head += kThreads) {
      args.masses[head] = args.column_mass;
      args.masses[args.q.heads + head] = args.diagonal_mass;
      args.max_counts[head] = args.max_columns;
      args.max_counts[args.q.heads + head] = args.max_diagonals;
    }
  }
  if (args.queries == nullptr) return;
  const bool mine = args.layout.Owner(position) == args.layout.rank;
  const int64_t token = args.layout.LocalIndex(position);
  const int32_t row = args.q.heads * args.q.head_dim;
  for (int32_t i = threadIdx.x; i < row; i += kThreads) {
    const int32_t head = i / args.q.head_dim, at = i % args.q.head_dim;
    args.queries[int64_t{query} * row + i] =
        mine ? args.q.data[token * args.q.token_stride + head * args.q.head_stride + at]
             : __nv_bfloat16(0.0f);
  }
}

template <typename T>
__device__ T BlockSum(T value, T* shared) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_down_sync(0xffffffffu, value, lanes);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += shared[warp];
  return sum;
}

__device__ __forceinline__ bool Covered(const uint64_t* diagonals, int64_t delta) {
  return (diagonals[delta / 64] >> (delta % 64) & 1) != 0;
}

// What the estimate queries see.
struct QueryViews {
  int position[kMaxEstimateQueries], start[kMaxEstimateQueries], block[kMaxEstimateQueries];
};

// Share of the estimate queries that see `position` whose diagonals do not cover it.
__device__ double UncoveredShare(const CountSelectionArgs& args, const QueryViews& queries,
                                 const uint64_t* diagonals, int position) {
  const int block = position / args.selected.tile;
  int all = 0, uncovered = 0;
  for (int32_t e = 0; e < args.estimate_queries; ++e) {
    if (position > queries.position[e] || position < queries.start[e]) continue;
    ++all;
    if (!Covered(diagonals, queries.block[e] - block)) ++uncovered;
  }
  return all == 0 ? 0.0 : static_cast<double>(uncovered) / static_cast<double>(all);
}

// Mass of the head's chosen columns that its diagonals do not hold already, among the candidates
// [first, end).
__device__ double ColumnMass(const CountSelectionArgs& counted, const QueryViews& queries, int head,
                             int32_t first, int32_t end, const uint64_t* diagonals) {
  const SelectArgs& args = counted.selected;
  const int64_t* const positions = args.column_positions + int64_t{head} * args.max_columns;
  const int32_t count = args.column_counts[head];
  double sum = 0.0;
  for (int32_t i = first + static_cast<int32_t>(threadIdx.x); i < end; i += kThreads) {
    const int64_t slot = i / args.max_columns * args.next_rank() +
                         int64_t{head} * args.max_columns + i % args.max_columns;
    const int32_t position = args.candidate_positions[slot];
    if (position < 0) continue;
    if (sm90::FindColumn(positions, count, position) < 0) continue;
    sum += args.candidate_mass[slot] * UncoveredShare(counted, queries, diagonals, position);
  }
  return sum;
}

// Query tiles that see any column of a tile of columns: those that the pass over columns visits.
__device__ int64_t ColumnTiles(const CountSelectionArgs& counted, int head, int32_t first,
                               const uint64_t* diagonals) {
  const SelectArgs& args = counted.selected;
  const int64_t* const positions = args.column_positions + int64_t{head} * args.max_columns;
  const int32_t end = min(first + args.tile, args.column_counts[head]);
  const int64_t query_tiles = (args.layout.local_tokens() + args.tile - 1) / args.tile;
  int64_t tiles = 0;
  for (int64_t a = threadIdx.x; a < query_tiles; a += kThreads) {
    const int64_t block = args.layout.Position(a * args.tile) / args.tile;
    // Where the document of the tile's first row starts; those of other rows start no earlier.
    const int64_t start =
        counted.document_starts == nullptr ? 0 : counted.document_starts[a * args.tile];
    for (int32_t c = first; c < end; ++c) {
      const int64_t delta = block - positions[c] / args.tile;
      if (delta <= 0) break;  // as all that follow
      if (positions[c] < start) continue;
      if (!Covered(diagonals, delta)) {
        ++tiles;
        break;
      }
    }
  }
  return tiles;
}

// Blocks a head: `mass_parts` that share its candidates' masses, and one for each tile of columns.
__global__ void CountSelectionKernel(const CountSelectionArgs args, int32_t mass_parts) {
  __shared__ double masses[kThreads / 32];
  __shared__ int64_t tiles[kThreads / 32];
  const SelectArgs& selected = args.selected;
  const auto head = static_cast<int32_t>(blockIdx.y), part = static_cast<int32_t>(blockIdx.x);
  const int64_t words = ((selected.layout.tokens + selected.tile - 1) / selected.tile + 63) / 64;
  const uint64_t* const diagonals = selected.diagonals + head * words;
  if (part >= mass_parts) {
    const int64_t visited =
        BlockSum(ColumnTiles(args, head, (part - mass_parts) * selected.tile, diagonals), tiles);
    if (threadIdx.x == 0 && visited > 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&args.counters->column_tiles),
                static_cast<unsigned long long>(visited));
    }
    return;
  }
  if (head == 0 && part == 0 && args.document_starts == nullptr) {
    for (int owner = threadIdx.x; owner < selected.layout.ranks; owner += kThreads) {
      args.owner_tiles[owner] += selected.load[owner];
    }
  }
  __shared__ QueryViews queries;
  for (int32_t e = threadIdx.x; e < args.estimate_queries; e += kThreads) {
    queries.position[e] = static_cast<int>(args.query_positions[e]);
    queries.start[e] = args.query_starts == nullptr ? 0 : static_cast<int>(args.query_starts[e]);
    queries.block[e] = queries.position[e] / selected.tile;
  }
  __syncthreads();
  const int32_t candidates = selected.layout.ranks * selected.max_columns;
  const int32_t first = part * kPartCandidates;
  const double columns = BlockSum(
      ColumnMass(args, queries, head, first, min(first + kPartCandidates, candidates), diagonals),
      masses);
  if (threadIdx.x == 0) {
    const IndexMass& mass = selected.masses[head];
    const double heads = selected.heads;
    const double kept = columns + (part == 0 ? static_cast<double>(mass.diagonals) : 0.0);
    if (mass.total > 0) {
      atomicAdd(&args.counters->recall, kept / static_cast<double>(mass.total) / heads);
    }
    if (part > 0) return;
    atomicAdd(&args.counters->verticals, selected.column_counts[head] / heads);
    atomicAdd(&args.counters->slashes, selected.diagonal_counts[head] / heads);
    atomicAdd(&args.counters->verticals_at_budget,
              static_cast<double>(mass.columns_at_budget) / heads);
    atomicAdd(&args.counters->slashes_at_budget,
              static_cast<double>(mass.diagonals_at_budget) / heads);
  }
}

// Tiles of a head's diagonals that documents do not hide, by owner; a thread a query tile.
__global__ void CountDiagonalsKernel(const CountSelectionArgs args) {
  extern __shared__ uint32_t owner_tiles[];
  const SelectArgs& selected = args.selected;
  const ShardLayout layout = selected.layout;
  const int64_t tile = selected.tile;
  for (int owner = threadIdx.x; owner < layout.ranks; owner += kThreads) owner_tiles[owner] = 0;
  __syncthreads();
  const int64_t a = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (a * tile < layout.local_tokens()) {
    const int64_t words = ((layout.tokens + tile - 1) / tile + 63) / 64;
    const uint64_t* const diagonals = selected.diagonals + blockIdx.y * words;
    const int64_t block = layout.Position(a * tile) / tile;
    // The first block that the tile's first row, and so any, sees.
    const int64_t last_delta = block - args.document_starts[a * tile] / tile;
    for (int64_t word = 0; word <= last_delta / 64; ++word) {
      uint64_t bits = diagonals[word];
      if (last_delta - word * 64 < 63) bits &= (uint64_t{2} << (last_delta - word * 64)) - 1;
      for (; bits != 0; bits &= bits - 1) {
        const int64_t delta = word * 64 + __ffsll(static_cast<long long>(bits)) - 1;
        atomicAdd(&owner_tiles[layout.Owner((block - delta) * tile)], 1u);
      }
    }
  }
  __syncthreads();
  for (int owner = threadIdx.x; owner < layout.ranks; owner += kThreads) {
    atomicAdd(reinterpret_cast<unsigned long long*>(args.owner_tiles + owner),
              static_cast<unsigned long long>(owner_tiles[owner]));
  }
}

__global__ void CountListedKernel(const int32_t* row_offsets, int64_t offsets, int64_t* tiles) {
  *tiles += row_offsets[offsets - 1];
}

__global__ void CountGroupsKernel(KeyGroups groups, SpreadRows tiles_of, ShardLayout queries,
                                  int64_t rows, unsigned long long* tiles) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int of_head = row < rows ? tiles_of.TilesOfGroups(queries, row, groups.ends[row]) -
                                       tiles_of.TilesOfGroups(queries, row, groups.begins[row])
                                 : 0;
  const int of_row = of_head * groups.heads_together;
  const int of_warp = __reduce_add_sync(~0u, of_row);
  if (threadIdx.x % 32 == 0 && of_warp > 0) {
    atomicAdd(tiles, static_cast<unsigned long long>(of_warp));
  }
}

// A block a tile of the sequence, in the order of ranks.
__global__ void OrderTileSumsKernel(const float* gathered, ShardLayout layout, int32_t tile,
                                    int64_t row, float* ordered) {
  const int64_t local_tiles = (layout.local_tokens() + tile - 1) / tile;
  layout.rank = static_cast<int32_t>(blockIdx.x / local_tiles);
  const int64_t target = layout.Position(blockIdx.x % local_tiles * tile) / tile;
  for (int64_t i = threadIdx.x; i < row; i += kThreads) {
    ordered[target * row + i] = gathered[int64_t{blockIdx.x} * row + i];
  }
}

// One thread: heads add up in their order.
__global__ void CountRecallKernel(const int64_t* kept, const int64_t* total, int32_t heads,
                                  LayerCounters* counters) {
  double sum = 0.0;
  for (int32_t head = 0; head < heads; ++head) sum += RecallOf(kept[head], total[head]);
  counters->recall += sum / heads;
}

}  // namespace

absl::Status PrepareEstimate(const EstimateInputsArgs& args, cudaStream_t stream) {
  PrepareEstimateKernel<<<args.count, kThreads, 0, stream>>>(args);
  return Launched("PrepareEstimate");
}

absl::Status CountSelection(const CountSelectionArgs& args, cudaStream_t stream) {
  const SelectArgs& selected = args.selected;
  const int32_t mass_parts =
      (selected.layout.ranks * selected.max_columns + kPartCandidates - 1) / kPartCandidates;
  const int32_t column_tiles = (selected.max_columns + selected.tile - 1) / selected.tile;
  CountSelectionKernel<<<dim3(mass_parts + column_tiles, selected.heads), kThreads, 0, stream>>>(
      args, mass_parts);
  RETURN_IF_ERROR(Launched("CountSelection"));
  if (args.document_starts == nullptr) return absl::OkStatus();
  const int64_t query_tiles =
      (args.selected.layout.local_tokens() + args.selected.tile - 1) / args.selected.tile;
  CountDiagonalsKernel<<<dim3(Blocks(query_tiles), args.selected.heads), kThreads,
                         sizeof(uint32_t) * args.selected.layout.ranks, stream>>>(args);
  return Launched("CountSelection: diagonals");
}

absl::Status CountRecall(const int64_t* kept, const int64_t* total, int32_t heads,
                         LayerCounters* counters, cudaStream_t stream) {
  CountRecallKernel<<<1, 1, 0, stream>>>(kept, total, heads, counters);
  return Launched("CountRecall");
}

absl::Status CountListed(const int32_t* row_offsets, int64_t offsets, int64_t* tiles,
                         cudaStream_t stream) {
  CountListedKernel<<<1, 1, 0, stream>>>(row_offsets, offsets, tiles);
  return Launched("CountListed");
}

absl::Status CountGroups(const KeyGroups& groups, const SpreadRows& tiles_of,
                         const ShardLayout& queries, int64_t rows, int64_t* tiles,
                         cudaStream_t stream) {
  CountGroupsKernel<<<Blocks(rows), kThreads, 0, stream>>>(
      groups, tiles_of, queries, rows, reinterpret_cast<unsigned long long*>(tiles));
  return Launched("CountGroups");
}

absl::Status OrderTileSums(const float* gathered, const ShardLayout& layout, int32_t tile,
                           int64_t row, float* ordered, cudaStream_t stream) {
  const int64_t tiles = (layout.local_tokens() + tile - 1) / tile * layout.ranks;
  OrderTileSumsKernel<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(gathered, layout, tile,
                                                                             row, ordered);
  return Launched("OrderTileSums");
}

}  // namespace ringleader::kernels::index
