// Whether GPUs gather queries that chose blocks each for itself, and how many rows that makes: what
// the engine allocates and estimates of memory reckon with (kernels/index/rows/query_rows.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "ringleader/kernels/balance_steps.h"
#include "ringleader/kernels/block_choice.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels {

// Pairs of a local query and a block before its own, of one head.
struct EarlierBlocks {
  int64_t chosen = 0;  // with an equal budget and where no move changes the choice, at most
  int64_t most = 0;    // at most
  int64_t all = 0;
};

// Of queries that keep topk_blocks or, with a density, MostBlocks(density, those that they see),
// their own counted (QueryGateStep), by a move up to kMostMove times as many, and where heads have
// budgets of their own up to three halves of those besides their own. Packed documents only make it
// fewer.
inline EarlierBlocks CountEarlierBlocks(const ShardLayout& queries, int32_t tile,
                                        int32_t block_size, int32_t topk_blocks, float density,
                                        bool is_moved, bool has_head_budgets = false) {
  EarlierBlocks count;
  const int64_t n = queries.local_tokens();
  for (int64_t first = 0; first < n; first += tile) {
    const auto before = static_cast<int32_t>(queries.Position(first) / block_size);
    const int32_t kept = KeptBefore(topk_blocks, density, /*halves=*/2, before);
    int32_t most = has_head_budgets ? KeptBefore(topk_blocks, density, /*halves=*/3, before) : kept;
    if (is_moved) {
      const float with_own = kMostMove * static_cast<float>(most + 1);
      most = std::min(static_cast<int32_t>(std::ceil(with_own)) - 1, before);
    }
    const int64_t rows = std::min<int64_t>(tile, n - first);
    count.chosen += rows * kept;
    count.most += rows * most;
    count.all += rows * before;
  }
  return count;
}

struct QueryRowsPlan {
  int64_t capacity = 0;  // rows of a head, padding included: whole tiles
  int32_t heads = 0;     // gathered at a time, of one KV head
};

// Of a row and dimension: its query and, in backward, its output's gradient in bf16 and its own
// gradient in fp32. In forward its query and its output in fp32, which is less.
inline constexpr int64_t kQueryRowBytes = 8;
// Rows that are gathered at a time, 4 GiB of 128 dimensions, unless one head has more; and the most
// that one head may have.
inline constexpr int64_t kQueryRowsAtOnce = int64_t{1} << 22;
inline constexpr int64_t kMostQueryRows = int64_t{1} << 23;
// Queries are gathered where they choose no more than this share of the blocks before their own. At
// a share of 0.2 steps are 2.1 times as fast as with tiles visited whole, at 0.4 1.6 times, at 0.8
// still 1.05 times (docs/limits.md); above that, where the two meet, nothing has been timed.
inline constexpr double kMostGatheredShare = 0.8;

inline bool GathersQueries(const EarlierBlocks& pairs) {
  return pairs.chosen > 0 &&
         static_cast<double>(pairs.chosen) <= kMostGatheredShare * static_cast<double>(pairs.all);
}

// Rows that a head may have, with each block's padding.
inline int64_t RowCapacity(const EarlierBlocks& pairs, int64_t blocks, int32_t tile) {
  return (pairs.most + blocks * (tile - 1)) / tile * tile + tile;
}

// The most rows that are gathered at a time, however many of `capacity` a step's queries choose:
// what memory estimates reckon with. `shared`: heads of a KV head.
inline int64_t MostRowsAtOnce(int64_t capacity, int64_t shared) {
  return std::min(kMostQueryRows,
                  std::max(capacity, std::min(shared * capacity, kQueryRowsAtOnce)));
}

// Nothing where tiles are visited whole instead. Heads of one KV head are gathered together, unless
// packed documents tell each head's rows another start.
inline std::optional<QueryRowsPlan> PlanQueryRows(const EarlierBlocks& pairs, int64_t blocks,
                                                  int32_t tile, int32_t block_size, int32_t heads,
                                                  int32_t kv_heads, bool has_documents) {
  if (!GathersQueries(pairs)) return std::nullopt;
  QueryRowsPlan plan = {.capacity = RowCapacity(pairs, blocks, tile), .heads = 1};
  const int64_t listed = heads * (plan.capacity / tile) * (block_size / tile);
  if (plan.capacity > kMostQueryRows || listed > std::numeric_limits<int32_t>::max()) {
    return std::nullopt;
  }
  const int32_t shared = heads / kv_heads;
  for (int32_t count = 2; count <= shared && !has_documents; ++count) {
    if (shared % count == 0 && count * plan.capacity <= kQueryRowsAtOnce) plan.heads = count;
  }
  return plan;
}

}  // namespace ringleader::kernels
