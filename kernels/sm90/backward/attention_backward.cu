// Host side of backward attention: checks, tensor maps, launch.
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/sm90/attention.h"
#include "kernels/sm90/backward/attention_backward_groups.h"
#include "kernels/sm90/backward/attention_backward_launch.cuh"
#include "kernels/sm90/backward/attention_query_gradient.h"
#include "kernels/sm90/backward/rounded_sum.h"
#include "kernels/sm90/columns.h"
#include "kernels/sm90/hopper.h"
#include "kernels/sm90/launch/launch.h"
#include "kernels/sm90/launch/launch_kernel.cuh"
#include "kernels/sm90/launch/prepare_mask.h"
#include "kernels/sm90/launch/split_lists.h"
#include "kernels/sm90/launch/tensor_map.h"

namespace ringleader::kernels::sm90 {

// These are attention_backward_intervals.cu's and attention_backward_chosen.cu's.
extern template absl::Status LaunchBackward<64, WalkKind::kIntervals128, QueryGradient::kTogether>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<64, WalkKind::kIntervals128, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<64, WalkKind::kIntervals64, QueryGradient::kApart>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<64, WalkKind::kIntervals64, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<128, WalkKind::kIntervals128, QueryGradient::kTogether>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status
LaunchBackward<128, WalkKind::kIntervals128, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<128, WalkKind::kIntervals64, QueryGradient::kApart>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<128, WalkKind::kIntervals64, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<64, WalkKind::kChosen128, QueryGradient::kTogether>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<64, WalkKind::kChosen128, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<64, WalkKind::kChosen64, QueryGradient::kApart>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<64, WalkKind::kChosen64, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<128, WalkKind::kChosen128, QueryGradient::kTogether>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<128, WalkKind::kChosen128, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<128, WalkKind::kChosen64, QueryGradient::kApart>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
extern template absl::Status LaunchBackward<128, WalkKind::kChosen64, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);

// Fills `stats`: [heads, query_blocks]. A pair of warps computes one block of queries.
__global__ void PrepareRowStats(RowStats* stats, const float* lse, const float* delta,
                                int32_t query_tokens, float scale) {
  const int32_t query = blockIdx.x * kBackwardQueries + threadIdx.x;
  const int64_t source = static_cast<int64_t>(blockIdx.y) * query_tokens + query;
  const bool exists = query < query_tokens;
  const float row_lse = exists ? lse[source] : -INFINITY;
  RowStats& block = stats[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x];
  block.lse_log2[threadIdx.x] = row_lse == -INFINITY ? INFINITY : row_lse * kLog2E;
  block.scaled_delta[threadIdx.x] = row_lse == -INFINITY ? 0.0f : delta[source] * scale;
}

// A CTA a part of a head, blockIdx.x: writes its items after those of the parts before it. lines:
// SplitMemory's, of which a block of keys has `lines_of_block`.
constexpr int kListItemsThreads = 128;
__global__ void __launch_bounds__(kListItemsThreads)
    ListItems(const int32_t* __restrict__ lines, int32_t lines_of_block, int32_t blocks,
              int32_t* items) {
  const auto count = [&](uint32_t part) {
    return (lines[part] + lines_of_block - 1) / lines_of_block;
  };
  int32_t before = 0;
  for (uint32_t i = threadIdx.x; i < blockIdx.x; i += kListItemsThreads) before += count(i);
  __shared__ int32_t first;
  if (threadIdx.x == 0) first = 0;
  __syncthreads();
  atomicAdd(&first, before);
  __syncthreads();
  const int32_t end = count(blockIdx.x);
  for (int32_t block = threadIdx.x; block < end; block += kListItemsThreads) {
    items[first + block] = static_cast<int32_t>(blockIdx.x) * blocks + block;
  }
}

namespace {

using Args = AttentionBackwardArgs<__nv_bfloat16>;

int64_t QueryBlocks(int64_t query_tokens) {
  return (query_tokens + kBackwardQueries - 1) / kBackwardQueries;
}
int64_t KeyBlocks(int64_t key_tokens) {
  return (key_tokens + kBackwardKeys - 1) / kBackwardKeys;
}

// Query heads of one work item. Fewer heads keep CTAs near each other in the sequence, so that more
// of what they read is in L2; more heads make its beginning and end cheap. Deterministic: all, so
// that dK and dV of a key are one item's.
int32_t HeadsPerItem(const Args& args, const AttentionShape& shape) {
  if (args.deterministic) return shape.heads / shape.kv_heads;
  switch (args.tiles.pattern) {
    case TilePattern::kCsr:
      return 1;
    case TilePattern::kToeplitz:
      return 4;
    case TilePattern::kFull:
    case TilePattern::kCausal:
    case TilePattern::kWindow:
      return 2;
  }
  return 2;  // CheckShape() has refused any other
}

// A call's memory for lists in parts, in int32: SplitMemory's begins and lines, and the items that
// are not empty, (head * most + part) * blocks + block, in order, then kNoItem.
struct PartsMemory {
  int64_t lines = 0, items = 0, end = 0;

  PartsMemory(int64_t heads, int64_t key_tiles, int64_t blocks, int64_t most)
      : lines(heads * (most + 1) * key_tiles),
        items(lines + heads * most),
        end(items + heads * most * blocks + kMostCtas) {}
};

// Whether a block of keys is seen by the fewer queries the later it lies: under a causal mask among
// a shard's own tokens and among stripes, where all shards lie alike. Others' keys in contiguous
// and zigzag shards lie before whole parts of the queries, and those that gathered queries see
// before all of them.
bool IsTriangle(const Args& args) {
  const ShardLayout &queries = args.query_layout, &keys = args.key_layout;
  const bool is_one_sequence =
      queries.kind == keys.kind && queries.ranks == keys.ranks && queries.tokens == keys.tokens;
  return args.tiles.intervals == nullptr && is_one_sequence &&
         (queries.kind == LayoutKind::kStriped || queries.rank == keys.rank);
}

// Parts of the queries whose q, dO and dQ take two thirds of a Hopper's L2. A triangle's lists,
// shorter from block to block, bring CTAs at different blocks together again: they are walked whole
// where memory is fast enough for what L2 misses until then.
ListParts PartsOf(const Args& args, const AttentionShape& shape) {
  constexpr double kFastMemory = 4e12;  // bytes a second
  constexpr int64_t kPartBytes = int64_t{32} << 20;
  constexpr int64_t kMostItems = int64_t{1} << 29;
  constexpr int32_t kFewestTiles = 8;
  if (args.tiles.pattern != TilePattern::kCsr || args.deterministic) return {};
  if (IsTriangle(args) && MemoryBandwidth() >= kFastMemory) return {};
  const int64_t bytes = shape.query_tokens * shape.head_dim * (2 + 2 + 4);  // bf16, bf16, fp32
  const int64_t items = std::max<int64_t>(KeyBlocks(shape.key_tokens) * shape.heads, 1);
  const int64_t most =
      std::min((bytes + kPartBytes - 1) / kPartBytes, std::max<int64_t>(kMostItems / items, 1));
  return {.most = static_cast<int32_t>(std::max<int64_t>(most, 1)), .fewest_tiles = kFewestTiles};
}

bool Rounds(const Args& args) {
  return args.rounded_dk.data != nullptr || args.rounded_dv.data != nullptr;
}

absl::Status Check(const Args& args, const AttentionShape& shape) {
  const auto check = [&](const char* name, const auto& tensor, int64_t tokens, int32_t heads) {
    return CheckTensor(name, tensor.data, tensor.tokens, tensor.heads, tensor.head_dim, tokens,
                       heads, shape.head_dim);
  };
  RETURN_IF_ERROR(check("q", args.q, shape.query_tokens, shape.heads));
  RETURN_IF_ERROR(check("k", args.k, shape.key_tokens, shape.kv_heads));
  RETURN_IF_ERROR(check("v", args.v, shape.key_tokens, shape.kv_heads));
  RETURN_IF_ERROR(check("d_out", args.d_out, shape.query_tokens, shape.heads));
  RETURN_IF_ERROR(check("dq", args.dq, shape.query_tokens, shape.heads));
  if (Rounds(args)) {
    if (args.dk.data != nullptr || args.dv.data != nullptr) {
      return absl::InvalidArgumentError(
          "dk or dv beside rounded_dk or rounded_dv; give two outputs of one type");
    }
    RETURN_IF_ERROR(check("rounded_dk", args.rounded_dk, shape.key_tokens, shape.kv_heads));
    RETURN_IF_ERROR(check("rounded_dv", args.rounded_dv, shape.key_tokens, shape.kv_heads));
    RETURN_IF_ERROR(CheckVectors("rounded_dk", args.rounded_dk));
    RETURN_IF_ERROR(CheckVectors("rounded_dv", args.rounded_dv));
  } else {
    RETURN_IF_ERROR(check("dk", args.dk, shape.key_tokens, shape.kv_heads));
    RETURN_IF_ERROR(check("dv", args.dv, shape.key_tokens, shape.kv_heads));
  }
  if (args.lse == nullptr) return absl::InvalidArgumentError("lse is null");
  if (args.delta == nullptr) return absl::InvalidArgumentError("delta is null");
  if (args.tiles.pattern == TilePattern::kCsr &&
      (args.tiles.column_offsets == nullptr || args.tiles.rows == nullptr)) {
    return absl::InvalidArgumentError(
        "tiles.column_offsets or tiles.rows is missing; kCsr needs both in backward");
  }
  if (args.deterministic && args.tiles.groups.groups != nullptr) {
    return absl::InvalidArgumentError(
        "tiles.groups in a deterministic backward; their gradients are added in any order");
  }
  if (args.deterministic && args.tiles.pattern == TilePattern::kCsr &&
      (args.tiles.row_offsets == nullptr || args.tiles.columns == nullptr)) {
    return absl::InvalidArgumentError(
        "tiles.row_offsets or tiles.columns is missing; kCsr needs both in a deterministic "
        "backward");
  }
  return absl::OkStatus();
}

// A call's workspace: two counters of work items, the mask memory, RowStats, lists in parts, and,
// where gradients are rounded, the sums of dK and dV, [n_k, kv_heads, d] in fp32.
int64_t RowStatsBytes(const Args& args) {
  return args.q.heads * QueryBlocks(args.q.tokens) * int64_t{sizeof(RowStats)};
}
int64_t SumBytes(const Args& args) {
  return args.k.tokens * args.k.heads * args.k.head_dim * int64_t{sizeof(float)};
}
int64_t ListPartsBytes(const Args& args, const AttentionShape& shape) {
  const ListParts parts = PartsOf(args, shape);
  if (parts.most == 1) return 0;
  const int64_t tile = args.tiles.tile == 64 ? 64 : 128;  // others are refused
  const int64_t tiles = (shape.key_tokens + tile - 1) / tile;
  const PartsMemory at(shape.heads, tiles, KeyBlocks(shape.key_tokens), parts.most);
  const int64_t bytes = at.end * int64_t{sizeof(int32_t)};
  return (bytes + 255) / 256 * 256;
}
int64_t WorkspaceBytes(const Args& args) {
  const AttentionShape shape = TileShape(args);
  return kCounterBytes + MaskBytes(shape, args.tiles) + RowStatsBytes(args) +
         ListPartsBytes(args, shape) + (Rounds(args) ? 2 * SumBytes(args) : 0);
}

// Makes *params, of whole lists and items of one head, walk parts of them. memory: PartsMemory's,
// which this fills.
absl::Status SplitIntoItems(const ListParts& parts, int32_t* memory, BackwardParams* params,
                            cudaStream_t stream) {
  TileWalk& walk = params->walk;
  const auto blocks = static_cast<int32_t>(KeyBlocks(walk.key_tokens));
  const PartsMemory at(params->heads, walk.key_tiles, blocks, parts.most);
  RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(memory + at.lines, 0, (at.items - at.lines) * sizeof(int32_t), stream),
      "backward: memset of lines");
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(memory + at.items, kNoItemByte,
                                       (at.end - at.items) * sizeof(int32_t), stream),
                       "backward: memset of items");
  RETURN_IF_ERROR(SplitLists<WalkDirection::kAlongColumn>(
      parts, params->heads, {.begins = memory, .lines = memory + at.lines}, &walk, stream));
  ListItems<<<params->heads * parts.most, kListItemsThreads, 0, stream>>>(
      memory + at.lines, kBackwardKeys >> walk.tile_log2, blocks, memory + at.items);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "backward: items of parts");
  params->list_parts = parts.most;
  params->items = memory + at.items;
  return absl::OkStatus();
}

template <WalkKind kKind>
absl::Status LaunchKernels(const Args& args, const AttentionShape& shape,
                           const BackwardParams& params, cudaStream_t stream) {
  ASSIGN_OR_RETURN(const int multiprocessors, MultiprocessorCount());
  const bool wide = shape.head_dim == 128;
  if (!args.deterministic) {
    constexpr auto kInside = kHasLists64<kKind> ? QueryGradient::kApart : QueryGradient::kTogether;
    if (args.tiles.groups.groups == nullptr || args.tiles.diagonals != nullptr) {
      const absl::Status launched =
          wide ? LaunchBackward<128, kKind, kInside>(args, params, multiprocessors, stream)
               : LaunchBackward<64, kKind, kInside>(args, params, multiprocessors, stream);
      RETURN_IF_ERROR(launched);
    }
    if (args.tiles.groups.groups == nullptr) return absl::OkStatus();
    return AddGroups(args, shape, params.row_stats, params.next_item + 1, multiprocessors, stream);
  }
  constexpr auto kElsewhere = QueryGradient::kElsewhere;
  const absl::Status launched =
      wide ? LaunchBackward<128, kKind, kElsewhere>(args, params, multiprocessors, stream)
           : LaunchBackward<64, kKind, kElsewhere>(args, params, multiprocessors, stream);
  RETURN_IF_ERROR(launched);
  return AddQueryGradient<kKind>(args, shape, params.columns, params.row_stats,
                                 params.next_item + 1, multiprocessors, stream);
}

template <WalkKind kKind>
absl::Status Run(const Args& args, const AttentionShape& shape, const ColumnWalk& columns,
                 const Workspace& workspace, cudaStream_t stream) {
  RETURN_IF_ERROR(Check(args, shape));
  RETURN_IF_ERROR(CheckWorkspace(workspace, WorkspaceBytes(args)));
  char* const mask_memory = static_cast<char*>(workspace.data) + kCounterBytes;
  char* const after_mask = mask_memory + MaskBytes(shape, args.tiles);
  AttentionShape walked = shape;
  if constexpr (kHasIntervals<kKind>) {
    RETURN_IF_ERROR(PrepareMask(shape, args.query_layout, args.key_layout, args.tiles,
                                /*by_column=*/true, mask_memory, stream));
    walked.mask_memory = mask_memory;
  }
  const auto stats = reinterpret_cast<RowStats*>(after_mask);
  BackwardParams params;
  params.walk =
      MakeTileWalk(walked, args.query_layout, args.key_layout, args.tiles, /*by_column=*/true);
  params.columns = columns;
  params.row_stats = stats;
  params.heads = shape.heads;
  params.kv_heads = shape.kv_heads;
  params.heads_per_item = HeadsPerItem(args, shape);
  params.query_blocks = static_cast<int32_t>(QueryBlocks(shape.query_tokens));
  params.scale = args.scale;
  params.scale_log2 = args.scale * kLog2E;
  params.next_item = static_cast<int32_t*>(workspace.data);
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(params.next_item, 0, 2 * sizeof(int32_t), stream),
                       "backward: memset");
  PrepareRowStats<<<dim3(params.query_blocks, shape.heads), kBackwardQueries, 0, stream>>>(
      stats, args.lse, args.delta, params.walk.query_tokens, args.scale);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "backward: row statistics");
  char* const after_stats = after_mask + RowStatsBytes(args);
  if (const ListParts parts = PartsOf(args, shape); parts.most > 1) {
    RETURN_IF_ERROR(
        SplitIntoItems(parts, reinterpret_cast<int32_t*>(after_stats), &params, stream));
  }
  if (!Rounds(args)) return LaunchKernels<kKind>(args, walked, params, stream);

  const auto sums = reinterpret_cast<float*>(after_stats + ListPartsBytes(args, shape));
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(sums, 0, 2 * SumBytes(args), stream),
                       "backward: memset of sums");
  Args summed = args;
  summed.dk = {.data = sums,
               .tokens = shape.key_tokens,
               .heads = shape.kv_heads,
               .head_dim = shape.head_dim,
               .token_stride = int64_t{shape.kv_heads} * shape.head_dim,
               .head_stride = shape.head_dim};
  summed.dv = summed.dk;
  summed.dv.data = sums + SumBytes(args) / sizeof(float);
  RETURN_IF_ERROR(LaunchKernels<kKind>(summed, walked, params, stream));
  return AddRounded({summed.dk.data, summed.dv.data}, {args.rounded_dk, args.rounded_dv}, stream);
}

}  // namespace

int64_t BackwardWorkspaceBytes(const Args& args) {
  return WorkspaceBytes(args);
}

absl::Status AttentionBackward(const Args& args, Workspace workspace, cudaStream_t stream) {
  const AttentionShape shape = TileShape(args);
  RETURN_IF_ERROR(CheckShape(shape, args.query_layout, args.key_layout, args.tiles));
  return RunForTiles(
      args.tiles, [&]<WalkKind kKind>() { return Run<kKind>(args, shape, {}, workspace, stream); });
}

int64_t ColumnBackwardWorkspaceBytes(const ColumnBackwardArgs& args) {
  return WorkspaceBytes({.q = args.q});
}

absl::Status ColumnBackward(const ColumnBackwardArgs& args, Workspace workspace,
                            cudaStream_t stream) {
  ASSIGN_OR_RETURN(const AttentionShape shape,
                   ColumnShape(args.q, args.columns, args.tiles, args.query_layout, args.scale));
  RETURN_IF_ERROR(CheckDense("keys", args.keys));
  RETURN_IF_ERROR(CheckDense("values", args.values));
  RETURN_IF_ERROR(CheckDense("d_keys", args.d_keys));
  RETURN_IF_ERROR(CheckDense("d_values", args.d_values));
  const Args as_tiles = {.q = args.q,
                         .k = ColumnRows(args.keys, shape),
                         .v = ColumnRows(args.values, shape),
                         .d_out = args.d_out,
                         .lse = args.lse,
                         .delta = args.delta,
                         .dq = args.dq,
                         .dk = ColumnRows(args.d_keys, shape),
                         .dv = ColumnRows(args.d_values, shape),
                         .query_layout = args.query_layout,
                         .key_layout = args.query_layout,
                         .tiles = args.tiles,
                         .scale = args.scale,
                         .deterministic = args.deterministic};
  return Run<WalkKind::kColumns>(as_tiles, shape, ColumnWalkOf(args.columns), workspace, stream);
}

}  // namespace ringleader::kernels::sm90
