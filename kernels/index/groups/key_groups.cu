#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/groups/key_group_references.cuh"
#include "kernels/index/groups/key_group_scores.cuh"
#include "kernels/index/groups/key_groups.h"
#include "kernels/index/threshold.cuh"
#include "kernels/sm90/hopper.h"
#include "kernels/sm90/launch/bytes_map.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {
namespace {

using fused::CheckPointer;
using fused::CheckSize;

constexpr int kKeepThreads = 256;
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;

// A thread finds the budget of a tile of the heads that choose together.
__global__ void BudgetKernel(const ProductParams p, const KeyGroupBudget budget,
                             const int32_t* head_halves, TileBudget* budgets) {
  const int tile = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), heads = blockIdx.y;
  if (tile >= p.tiles) return;
  const int64_t query = static_cast<int64_t>(tile) * kGroupTile;
  const int64_t first = p.PositionOf(query), start = p.StartOf(static_cast<uint32_t>(query));
  const int halves = HalvesOf(head_halves, heads * p.heads_together);
  budgets[heads * static_cast<int64_t>(p.tiles) + tile] = {
      .kept = budget.MostGroups(first, start, halves),
      .is_sampled = budget.IsSampled(first, start, halves, p.heads_together)};
}

// Copies the rows of the sample, of so many parts each.
__global__ void SampleKernel(const uint4* keys, int64_t tokens, int row_parts, int64_t parts,
                             uint4* sample) {
  const int64_t part = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (part >= parts) return;
  // The last of the sample may be none: it is before no tile.
  const int64_t key = min(int64_t{SampleKey(static_cast<int>(part / row_parts))}, tokens - 1);
  sample[part] = keys[key * row_parts + part % row_parts];
}

struct KeepParams {
  const int64_t* rows = nullptr;  // KeyGroupGateStep's, as the next
  uint32_t* chosen = nullptr;
};

struct KeepShared {
  uint32_t counts[kDigits];
  uint64_t scan[32];
  // The digit where the selection ends, how many groups have it, and how many a lower one.
  uint32_t digit, count, before;
};

// A tile's candidates, in the order of taking: smaller keys first. A thread reads eight at a time.
struct CandidateRow {
  static constexpr int kAtOnce = sizeof(uint4) / sizeof(uint16_t);

  const uint16_t* scores;   // by group of the sequence
  const uint16_t* seconds;  // those of the head that chooses with it, or the same
  uint32_t begin, end;      // groups
  int group_bits;           // of `end`
  bool late;                // where ties go

  __device__ __forceinline__ int KeyBits() const { return 16 + group_bits; }
  // Calls take(i, key) for the candidates among the kAtOnce groups from `first`, a multiple, on.
  template <typename Take>
  __device__ __forceinline__ void ForSome(uint32_t first, const Take& take) const {
    uint4 pairs = *reinterpret_cast<const uint4*>(scores + first);
    if (seconds != scores) {
      const uint4 others = *reinterpret_cast<const uint4*>(seconds + first);
      pairs = {__vminu2(pairs.x, others.x), __vminu2(pairs.y, others.y),
               __vminu2(pairs.z, others.z), __vminu2(pairs.w, others.w)};
    }
    const uint32_t of_pairs[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t group = first + i, score = of_pairs[i / 2] >> i % 2 * 16 & 0xFFFFu;
      const uint32_t place = late ? end - group : group;
      if (group >= begin && group < end) {
        take(i, static_cast<uint64_t>(score) << group_bits | place);
      }
    }
  }
  // Calls take(key) for a thread's share of all candidates.
  template <typename Take>
  __device__ __forceinline__ void ForEach(const Take& take) const {
    for (uint32_t first = begin / kAtOnce * kAtOnce + threadIdx.x * kAtOnce; first < end;
         first += kKeepThreads * kAtOnce) {
      ForSome(first, [&](int, uint64_t key) { take(key); });
    }
  }
};

// Finds the digit of the `remaining`-th smallest from the counts of all.
__device__ __forceinline__ void FindDigit(KeepShared& shared, uint32_t remaining) {
  constexpr int kOwn = kDigits / kKeepThreads;
  const uint32_t* const own = shared.counts + threadIdx.x * kOwn;
  uint32_t sum = 0;
  for (int i = 0; i < kOwn; ++i) sum += own[i];
  const auto inclusive = static_cast<uint32_t>(BlockScan(sum, shared.scan).inclusive);
  uint32_t before = inclusive - sum;
  if (before < remaining && remaining <= inclusive) {
    int i = 0;
    for (; before + own[i] < remaining; ++i) before += own[i];
    shared.digit = threadIdx.x * kOwn + i;
    shared.count = own[i];
    shared.before = before;
  }
  __syncthreads();
}

// The `kept` smallest keys are those below what this returns: a radix select from the top bits,
// until all that share the digits found so far are kept. Keys differ, by their groups at least.
__device__ uint64_t KeyLimit(KeepShared& shared, const CandidateRow& row, uint32_t kept) {
  if (kept == 0) return 0;
  if (kept == row.end - row.begin) return ~uint64_t{0};
  uint64_t prefix = 0;
  int above = row.KeyBits();  // bits from here on are in the prefix
  while (true) {
    const int shift = max(above - kDigitBits, 0);
    for (int i = threadIdx.x; i < kDigits; i += kKeepThreads) shared.counts[i] = 0;
    __syncthreads();
    row.ForEach([&](uint64_t key) {
      if (key >> above != prefix >> above) return;
      const uint64_t digit = (key >> shift) & ((1u << (above - shift)) - 1);
      atomicAdd(&shared.counts[digit], 1u);
    });
    __syncthreads();
    FindDigit(shared, kept);
    prefix |= static_cast<uint64_t>(shared.digit) << shift;
    kept -= shared.before;
    if (shared.count == kept) return prefix + (uint64_t{1} << shift);
    above = shift;
  }
}

// A block of threads takes a tile of queries of the heads that choose together: finds which groups
// it keeps and sets their bits, a byte a thread at a time.
__global__ void __launch_bounds__(kKeepThreads)
    KeepGroupsKernel(const ProductParams p, const KeepParams keep) {
  __shared__ KeepShared shared;
  const int heads = blockIdx.y, head = heads * p.heads_together,
            tile = p.first_block * kBlockTiles + blockIdx.x;
  const int64_t query = static_cast<int64_t>(tile) * kGroupTile;
  const int64_t first = p.PositionOf(query), start = p.StartOf(static_cast<uint32_t>(query));
  const auto end = static_cast<uint32_t>(first / kGroupKeys);
  const auto scores_of = [&](int of) {
    return p.scores +
           (static_cast<int64_t>(of) * p.blocks * kBlockTiles + blockIdx.x) * p.row_groups;
  };
  const CandidateRow row = {.scores = scores_of(head),
                            .seconds = scores_of(head + p.heads_together - 1),
                            .begin = static_cast<uint32_t>(start / kGroupKeys),
                            .end = end,
                            .group_bits = 32 - __clz(end),
                            .late = TiesGoLate(heads)};
  const int kept = p.budgets[heads * static_cast<int64_t>(p.tiles) + tile].kept;
  const uint64_t limit = KeyLimit(shared, row, static_cast<uint32_t>(kept));
  auto* const chosen =
      reinterpret_cast<uint8_t*>(keep.chosen + heads * keep.rows[p.tiles] + keep.rows[tile]);
  constexpr uint32_t kByte = CandidateRow::kAtOnce;
  const uint32_t bytes = BlockWords(static_cast<int32_t>(end)) * sizeof(uint32_t);
  for (uint32_t byte = threadIdx.x; byte < bytes; byte += kKeepThreads) {
    uint32_t bits = 0;
    if (byte >= row.begin / kByte && byte * kByte < row.end) {
      row.ForSome(byte * kByte, [&](int i, uint64_t key) { bits |= (key < limit ? 1u : 0u) << i; });
    }
    chosen[byte] = static_cast<uint8_t>(bits);
  }
}

// How the queries are cut, so that the scores of those at work fit the workspace.
struct Slabs {
  int64_t row_groups = 0;      // of the sequence, up to whole stages
  int64_t blocks = 0;          // of this rank's queries
  int64_t blocks_at_once = 0;  // of all heads
  int64_t sample = 0;          // keys; 0: it will do for no tile
  size_t reference_bytes = 0, budget_bytes = 0, sample_bytes = 0, score_bytes = 0;
};

Slabs SlabsOf(int heads, int kv_heads, const KeyGroupGateStep& step) {
  const int64_t queries = SpreadRows{step.tile}.Rows(step.query_layout.local_tokens());
  Slabs slabs;
  slabs.row_groups = (step.query_layout.tokens + kStageKeys - 1) / kStageKeys * kStageGroups;
  slabs.blocks = (queries + kBlockQueries - 1) / kBlockQueries;
  const size_t block_bytes = sizeof(uint16_t) * slabs.row_groups * kBlockTiles * heads;
  slabs.blocks_at_once = std::clamp<int64_t>(
      static_cast<int64_t>(kKeyGroupWorkspaceBytes / block_bytes), 1, slabs.blocks);
  slabs.reference_bytes = (sizeof(__half) * heads * queries + 15) / 16 * 16;
  const int64_t tiles = (queries + kGroupTile - 1) / kGroupTile;
  slabs.budget_bytes = (sizeof(TileBudget) * heads * tiles + 15) / 16 * 16;
  const int64_t tokens = step.query_layout.tokens, last = (tokens - 1) / step.tile * step.tile;
  if (step.budget().IsSampled(last, 0, step.head_halves == nullptr ? 2 : 3, step.heads_together)) {
    slabs.sample = (tokens + kSampleEvery - 1) / kSampleEvery;
  }
  slabs.sample_bytes = static_cast<size_t>(slabs.sample) * kv_heads * kScoreDims;
  slabs.score_bytes = block_bytes * slabs.blocks_at_once;
  return slabs;
}

absl::Status CheckLayout(const ShardLayout& layout) {
  if (layout.ranks == 1) return absl::OkStatus();
  const int64_t dealt = layout.kind == LayoutKind::kStriped  ? layout.stripe
                        : layout.kind == LayoutKind::kZigzag ? layout.tokens / layout.chunks()
                                                             : layout.local_tokens();
  return CheckSize(dealt, "ChooseKeyGroups: tokens of a chunk of the layout", kGroupTile, INT64_MAX,
                   kGroupTile);
}

absl::Status Check(int heads, int kv_heads, const KeyGroupGateStep& step) {
  if (!(step.scale > 0.0f)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("ChooseKeyGroups: scale is %g; it must be above 0", step.scale));
  }
  if (!(step.density > 0.0f && step.density <= 1.0f)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "ChooseKeyGroups: density is %g; it must be above 0 and at most 1", step.density));
  }
  if (step.tile != 64 && step.tile != 16) {
    return absl::InvalidArgumentError(
        absl::StrFormat("ChooseKeyGroups: tile is %d; 64 and 16 are supported", step.tile));
  }
  const int64_t tokens = step.query_layout.tokens;
  RETURN_IF_ERROR(CheckSize(kv_heads, "ChooseKeyGroups: heads of k", 1, 65535));
  RETURN_IF_ERROR(CheckSize(heads, "ChooseKeyGroups: heads of q", kv_heads, 65535, kv_heads));
  RETURN_IF_ERROR(CheckSize(step.heads_together, "ChooseKeyGroups: heads_together", 1, 2));
  RETURN_IF_ERROR(CheckSize(heads / kv_heads, "ChooseKeyGroups: heads of q for each of k",
                            step.heads_together, 65535, step.heads_together));
  RETURN_IF_ERROR(CheckSize(tokens, "ChooseKeyGroups: tokens of the sequence", 1, 1 << 30));
  RETURN_IF_ERROR(CheckLayout(step.query_layout));
  RETURN_IF_ERROR(CheckPointer(step.rows, "ChooseKeyGroups: rows"));
  return CheckPointer(step.chosen, "ChooseKeyGroups: chosen");
}

TokenMajor<const uint8_t> RowsOf(const uint8_t* data, int64_t tokens, int heads) {
  return {data, tokens, heads, kScoreDims, int64_t{heads} * kScoreDims, kScoreDims};
}

absl::Status CopySample(const KeyGroupGateStep& step, int kv_heads, const Slabs& slabs,
                        uint8_t* sample, cudaStream_t stream) {
  const int64_t parts = static_cast<int64_t>(slabs.sample_bytes / sizeof(uint4));
  SampleKernel<<<static_cast<unsigned>((parts + kKeepThreads - 1) / kKeepThreads), kKeepThreads, 0,
                 stream>>>(reinterpret_cast<const uint4*>(step.keys), step.query_layout.tokens,
                           kv_heads * kScoreDims / static_cast<int>(sizeof(uint4)), parts,
                           reinterpret_cast<uint4*>(sample));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ChooseKeyGroups: sample");
  return absl::OkStatus();
}

template <typename Shared, typename... Maps>
absl::Status LaunchProducts(void (*kernel)(ProductParams, Maps...), cudaStream_t stream,
                            const ProductParams& params, const Maps&... maps) {
  int device = 0, multiprocessors = 0;
  RETURN_IF_CUDA_ERROR(cudaGetDevice(&device), "ChooseKeyGroups");
  RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
      "ChooseKeyGroups");
  constexpr int kBytes = sizeof(Shared);
  RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
      "ChooseKeyGroups");
  kernel<<<multiprocessors, kProductThreads, kBytes, stream>>>(params, maps...);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ChooseKeyGroups: products");
  return absl::OkStatus();
}

}  // namespace

size_t KeyGroupWorkspaceBytes(int heads, int kv_heads, const KeyGroupGateStep& step) {
  const Slabs slabs = SlabsOf(heads, kv_heads, step);
  return slabs.reference_bytes + slabs.budget_bytes + slabs.sample_bytes + slabs.score_bytes;
}

absl::Status ChooseKeyGroups(int heads, int kv_heads, const KeyGroupGateStep& step, void* workspace,
                             cudaStream_t stream) {
  constexpr char kName[] = "ChooseKeyGroups";
  RETURN_IF_ERROR(Check(heads, kv_heads, step));
  RETURN_IF_ERROR(CheckPointer(workspace, "ChooseKeyGroups: workspace"));
  RETURN_IF_ERROR(sm90::CheckHopper());
  const SpreadRows spread = {step.tile};
  const int64_t queries = spread.Rows(step.query_layout.local_tokens()),
                tokens = step.query_layout.tokens;
  ASSIGN_OR_RETURN(
      const CUtensorMap query_map,
      sm90::LoadBytesMap(RowsOf(step.queries, queries, heads), kWarpgroupQueries, kName));
  ASSIGN_OR_RETURN(const CUtensorMap key_map,
                   sm90::LoadBytesMap(RowsOf(step.keys, tokens, kv_heads), kStageKeys, kName));
  ASSIGN_OR_RETURN(const CUtensorMap own_map,
                   sm90::LoadBytesMap(RowsOf(step.keys, tokens, kv_heads), kGroupTile, kName));
  const Slabs slabs = SlabsOf(heads, kv_heads, step);
  const int64_t stages = (tokens + kStageKeys - 1) / kStageKeys;
  const auto query_tiles = static_cast<int>((queries + kGroupTile - 1) / kGroupTile);
  auto* const memory = static_cast<char*>(workspace);
  auto* const budgets = reinterpret_cast<TileBudget*>(memory + slabs.reference_bytes);
  auto* const sample = reinterpret_cast<uint8_t*>(budgets) + slabs.budget_bytes;
  ProductParams params = {.layout = step.query_layout,
                          .document_starts = step.document_starts,
                          .rows = spread,
                          .queries = queries,
                          .last_query = static_cast<uint32_t>(step.query_layout.local_tokens() - 1),
                          .heads = heads,
                          .group = heads / kv_heads,
                          .blocks = static_cast<int>(slabs.blocks),
                          .budgets = budgets,
                          .heads_together = step.heads_together,
                          .tiles = query_tiles,
                          .references = reinterpret_cast<__half*>(memory),
                          .scores = reinterpret_cast<uint16_t*>(sample + slabs.sample_bytes),
                          .row_groups = slabs.row_groups};
  const KeepParams keep = {.rows = step.rows, .chosen = step.chosen};
  const int rows_of_heads = heads / step.heads_together;
  BudgetKernel<<<dim3((query_tiles + kKeepThreads - 1) / kKeepThreads, rows_of_heads), kKeepThreads,
                 0, stream>>>(params, step.budget(), step.head_halves, budgets);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ChooseKeyGroups: budgets");
  RETURN_IF_ERROR(LaunchProducts<ReferenceShared>(ReferenceKernel<false>, stream, params, query_map,
                                                  key_map, own_map));
  if (slabs.sample > 0) {
    RETURN_IF_ERROR(CopySample(step, kv_heads, slabs, sample, stream));
    ASSIGN_OR_RETURN(const CUtensorMap sample_map,
                     sm90::LoadBytesMap(RowsOf(sample, slabs.sample, kv_heads), kStageKeys, kName));
    RETURN_IF_ERROR(LaunchProducts<ReferenceShared>(ReferenceKernel<true>, stream, params,
                                                    query_map, sample_map, own_map));
  }
  params.chunks = static_cast<int>((stages + kChunkStages - 1) / kChunkStages);
  for (int64_t block = 0; block < slabs.blocks; block += slabs.blocks_at_once) {
    params.first_block = static_cast<int>(block);
    params.blocks = static_cast<int>(std::min(slabs.blocks_at_once, slabs.blocks - block));
    RETURN_IF_ERROR(LaunchProducts<ProductShared>(ScoreKernel, stream, params, query_map, key_map));
    const int tiles =
        std::min(params.blocks * kBlockTiles, query_tiles - params.first_block * kBlockTiles);
    KeepGroupsKernel<<<dim3(tiles, rows_of_heads), kKeepThreads, 0, stream>>>(params, keep);
    RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ChooseKeyGroups: keep");
  }
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
