// What a batch of whole sequences attends to, chosen by an engine (attention_calls.h) that also has
//   Run(step, q, k): a BlockStep
//   VerticalSlash(...): the index of one sequence
//   BuildLists(...): kCsr's lists from chosen blocks
#pragma once

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels/ops/attention_calls.h"
#include "kernels/ops/attention_ops.h"
#include "ringleader/kernels/block_choice.h"
#include "ringleader/kernels/index.h"
#include "ringleader/kernels/shares.h"

namespace ringleader::kernels::ops {

// GroupRows of one rank's sequence, [tiles + 1] int64 on x's device, without waiting for it.
inline torch::Tensor GroupRowsLike(const torch::Tensor& x, const AttentionSizes& sizes) {
  constexpr int64_t kTilesOfWord = 32 / (kGroupTile / kGroupKeys);
  const auto longs = x.options().dtype(torch::kLong);
  const torch::Tensor words = torch::arange(sizes.Tiles(kGroupTile), longs)
                                  .add_(kTilesOfWord - 1)
                                  .floor_divide_(kTilesOfWord);
  return torch::cat({torch::zeros({1}, longs), words.cumsum(0)});
}

inline uint32_t* Bits(const torch::Tensor& x) {
  return reinterpret_cast<uint32_t*>(x.mutable_data_ptr<int32_t>());
}

inline void CheckTile(int64_t tile) {
  TORCH_CHECK(tile == 64 || tile == 128, "tile is ", tile, "; 64 and 128 are supported");
}

// MeanKeys::starts of each sequence, of where its tokens' documents start.
inline torch::Tensor KeyStarts(const torch::Tensor& documents) {
  constexpr int64_t kPart = MeanKeys::kTokens;
  const int64_t tokens = documents.size(1);
  const torch::Tensor ends =
      torch::arange(kPart, tokens + kPart, kPart, documents.options().dtype(torch::kLong));
  return documents.index_select(1, ends.clamp_max(tokens) - 1);
}

// QueryGateStep's chosen, [batch, heads, tiles, words], and queries, [batch, heads, blocks, words].
template <typename Engine>
std::tuple<torch::Tensor, torch::Tensor> ChooseMoba(Engine& engine, const torch::Tensor& q,
                                                    const torch::Tensor& k,
                                                    const std::optional<torch::Tensor>& documents,
                                                    int64_t tile, int64_t block_size,
                                                    int64_t topk_blocks, double density) {
  const AttentionSizes sizes = SizesOf(q, k);
  CheckDocuments(documents, q, sizes);
  CheckTile(tile);
  CheckBlockSize("block_size", block_size, tile);
  const int64_t blocks = sizes.Tiles(block_size);
  TORCH_CHECK(blocks <= kMaxGatedBlocks, "block_size: ", block_size, " makes ", blocks,
              " blocks of ", sizes.tokens, " tokens; there may be ", kMaxGatedBlocks,
              ": make it larger");
  TORCH_CHECK(topk_blocks >= 1, "topk_blocks is ", topk_blocks,
              "; a query keeps its own block at least");
  TORCH_CHECK(density >= 0 && density <= 1, "density is ", density, "; it must lie in [0, 1]");
  const torch::Tensor queries = engine.Take("q", q), keys = engine.Take("k", k);
  const auto ints = q.options().dtype(torch::kInt);
  const torch::Tensor chosen = torch::empty({sizes.batch, sizes.heads, sizes.Tiles(tile),
                                             BlockWords(static_cast<int32_t>(blocks))},
                                            ints),
                      of_queries = torch::empty(
                          {sizes.batch, sizes.heads, blocks, QueryWords(sizes.tokens)}, ints),
                      key_sums = torch::empty({sizes.Tiles(tile), sizes.kv_heads, sizes.head_dim},
                                              q.options().dtype(torch::kFloat));
  std::optional<torch::Tensor> key_starts;
  if (documents) key_starts = KeyStarts(*documents);
  for (int64_t b = 0; b < sizes.batch; ++b) {
    const MeanKeys counted = {.starts = StartsOf(key_starts, b)};
    Check(engine.Run(TileKeySumsStep{.layout = sizes.layout(),
                                     .counted = counted,
                                     .tile = static_cast<int32_t>(tile),
                                     .sums = key_sums.mutable_data_ptr<float>()},
                     queries[b], keys[b]));
    Check(
        engine.Run(QueryGateStep{.key_sums = key_sums.const_data_ptr<float>(),
                                 .counted = counted,
                                 .query_layout = sizes.layout(),
                                 .document_starts = StartsOf(documents, b),
                                 .tile = static_cast<int32_t>(tile),
                                 .block_size = static_cast<int32_t>(block_size),
                                 .topk_blocks = static_cast<int32_t>(std::min(topk_blocks, blocks)),
                                 .density = ShareToRoundDown(density),
                                 .queries = Bits(of_queries[b]),
                                 .chosen = Bits(chosen[b])},
                   queries[b], keys[b]));
  }
  return {chosen, of_queries};
}

// What Visit's kKeyGroups has for lists: KeyGroupGateStep's choice.
template <typename Engine>
std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> ChooseKeyGroups(
    Engine& engine, const torch::Tensor& q, const torch::Tensor& k,
    const std::optional<torch::Tensor>& documents, double scale, double density) {
  const AttentionSizes sizes = SizesOf(q, k);
  CheckDocuments(documents, q, sizes);
  CheckGroupDensity(density);
  const torch::Tensor queries = engine.Take("q", q), keys = engine.Take("k", k);
  const auto ints = q.options().dtype(torch::kInt), longs = q.options().dtype(torch::kLong),
             floats = q.options().dtype(torch::kFloat), bytes = q.options().dtype(torch::kByte);
  const torch::Tensor diagonals =
      torch::zeros({sizes.batch, sizes.heads, (sizes.Tiles(kGroupTile) + 63) / 64}, longs);
  diagonals.select(2, 0).fill_(1);
  const torch::Tensor rows = GroupRowsLike(q, sizes),
                      chosen = torch::empty({sizes.batch, sizes.heads, GroupWords(sizes)}, ints),
                      energy = torch::empty({2, sizes.kv_heads, sizes.head_dim}, longs),
                      largest = torch::empty(energy.sizes(), floats),
                      dims = torch::empty({sizes.kv_heads, kScoreDims}, ints),
                      inverses = torch::empty({2, sizes.kv_heads}, floats),
                      narrow_queries = torch::empty({sizes.tokens, sizes.heads, kScoreDims}, bytes),
                      narrow_keys = torch::empty({sizes.tokens, sizes.kv_heads, kScoreDims}, bytes);
  for (int64_t b = 0; b < sizes.batch; ++b) {
    const auto run = [&](const BlockStep& step) { Check(engine.Run(step, queries[b], keys[b])); };
    run(DimEnergyStep{.tokens = sizes.tokens,
                      .rows = sizes.tokens,
                      .energy = energy.mutable_data_ptr<int64_t>(),
                      .largest = largest.mutable_data_ptr<float>()});
    run(PickDimsStep{.energy = energy.const_data_ptr<int64_t>(),
                     .largest = largest.const_data_ptr<float>(),
                     .dims = dims.mutable_data_ptr<int32_t>(),
                     .inverses = inverses.mutable_data_ptr<float>()});
    run(NarrowRowsStep{.dims = dims.const_data_ptr<int32_t>(),
                       .inverses = inverses.const_data_ptr<float>(),
                       .queries = narrow_queries.mutable_data_ptr<uint8_t>(),
                       .keys = narrow_keys.mutable_data_ptr<uint8_t>()});
    run(KeyGroupGateStep{.queries = narrow_queries.const_data_ptr<uint8_t>(),
                         .keys = narrow_keys.const_data_ptr<uint8_t>(),
                         .query_layout = sizes.layout(),
                         .document_starts = StartsOf(documents, b),
                         .scale = static_cast<float>(scale),
                         .density = static_cast<float>(density),
                         .rows = rows.const_data_ptr<int64_t>(),
                         .chosen = Bits(chosen[b])});
  }
  return {diagonals, chosen, rows};
}

// AntidiagonalGateStep's chosen, [batch, heads, tiles, words].
template <typename Engine>
torch::Tensor ChooseXAttention(Engine& engine, const torch::Tensor& q, const torch::Tensor& k,
                               const std::optional<torch::Tensor>& documents, int64_t tile,
                               int64_t stride, double scale, double threshold, double density) {
  const AttentionSizes sizes = SizesOf(q, k);
  CheckDocuments(documents, q, sizes);
  CheckTile(tile);
  TORCH_CHECK(stride == 8 || stride == 16 || stride == 32 || stride == 64, "stride is ", stride,
              "; 8, 16, 32 and 64 are supported");
  TORCH_CHECK(threshold > 0 && threshold <= 1, "threshold is ", threshold,
              "; it must lie in (0, 1]");
  TORCH_CHECK(density >= 0 && density <= 1, "density is ", density, "; it must lie in [0, 1]");
  const torch::Tensor queries = engine.Take("q", q), keys = engine.Take("k", k);
  const auto blocks = static_cast<int32_t>(sizes.Tiles(tile));
  torch::Tensor chosen = torch::empty({sizes.batch, sizes.heads, blocks, BlockWords(blocks)},
                                      q.options().dtype(torch::kInt));
  for (int64_t b = 0; b < sizes.batch; ++b) {
    Check(engine.Run(AntidiagonalGateStep{.query_layout = sizes.layout(),
                                          .seen = {.document_starts = StartsOf(documents, b)},
                                          .tile = static_cast<int32_t>(tile),
                                          .stride = static_cast<int32_t>(stride),
                                          .scale = static_cast<float>(scale),
                                          .threshold = static_cast<float>(threshold),
                                          .density = ShareToRoundDown(density),
                                          .chosen = Bits(chosen[b])},
                     queries[b], keys[b]));
  }
  return chosen;
}

// How many diagonals a head may keep, in DiagonalCost's units.
inline int32_t DiagonalBudget(const VerticalSlashOptions& options, int64_t blocks) {
  if (options.density == 0.0) {
    return static_cast<int32_t>(std::min(options.max_diagonals, blocks));
  }
  int64_t all = 0;
  for (int64_t delta = 0; delta < blocks; ++delta) {
    all += DiagonalCost(/*by_tiles=*/true, blocks, delta);
  }
  return static_cast<int32_t>(
      std::max<int64_t>(1, std::llround(0.8 * options.density * static_cast<double>(all))));
}

// The index of each sequence; ChooseVerticalSlash in attention_ops.h says what it takes.
template <typename Engine>
std::tuple<torch::Tensor, torch::Tensor, torch::Tensor, torch::Tensor> ChooseColumnsAndDiagonals(
    Engine& engine, const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& positions,
    const std::optional<torch::Tensor>& starts, double scale, const VerticalSlashOptions& options) {
  const AttentionSizes sizes = SizesOf(q, k);
  CheckTile(options.tile);
  const int64_t queries = positions.numel();
  TORCH_CHECK(positions.dim() == 1 && positions.scalar_type() == torch::kLong &&
                  positions.device() == q.device() && positions.is_contiguous() && queries > 0 &&
                  queries <= kMaxEstimateQueries && queries <= sizes.tokens,
              "estimate_queries: positions are ", positions.toString(), " ", positions.sizes(),
              "; there must be 1 to ", kMaxEstimateQueries, ", no more than tokens, int64");
  TORCH_CHECK(!starts || (starts->scalar_type() == torch::kLong && starts->is_contiguous() &&
                          starts->dim() == 2 && starts->size(0) == sizes.batch &&
                          starts->size(1) == queries),
              "estimate_queries: starts must be int64 [batch, queries]");
  for (const double mass : {options.column_mass, options.diagonal_mass}) {
    TORCH_CHECK(mass > 0 && mass <= 1, "column_mass and diagonal_mass must lie in (0, 1]; got ",
                mass);
  }
  TORCH_CHECK(options.max_columns >= 1 && options.max_columns <= sizes.tokens, "max_columns is ",
              options.max_columns, "; it must be 1 to the tokens (", sizes.tokens, ")");
  TORCH_CHECK(options.density >= 0 && options.density <= 1, "density is ", options.density,
              "; it must lie in [0, 1]");
  TORCH_CHECK(options.max_diagonals >= 1, "max_diagonals is ", options.max_diagonals,
              "; it must be positive");
  TORCH_CHECK(options.sink_tokens >= 0 && options.sink_tokens <= options.max_columns,
              "sink_tokens is ", options.sink_tokens, "; it must be 0 to max_columns (",
              options.max_columns, ")");
  TORCH_CHECK(options.local_blocks >= 0, "local_blocks is ", options.local_blocks,
              "; it must not be negative");
  const torch::Tensor rows = engine.Take("q", q.index_select(2, positions)),
                      keys = engine.Take("k", k);
  const int64_t words = (sizes.Tiles(options.tile) + 63) / 64;
  const auto longs = q.options().dtype(torch::kLong);
  const torch::Tensor visited = torch::empty({sizes.batch}, longs);
  // Allocations of their own: what is somewhere within one may not be aligned as kernels ask.
  std::vector<torch::Tensor> diagonals, column_positions, column_counts;
  for (int64_t b = 0; b < sizes.batch; ++b) {
    diagonals.push_back(torch::zeros({sizes.heads, words}, longs));
    column_positions.push_back(torch::empty({sizes.heads, options.max_columns}, longs));
    column_counts.push_back(torch::empty({sizes.heads}, q.options().dtype(torch::kInt)));
    Check(engine.VerticalSlash(
        rows[b], keys[b], sizes, positions.const_data_ptr<int64_t>(),
        starts ? (*starts)[b].template const_data_ptr<int64_t>() : nullptr,
        static_cast<float>(scale), options,
        reinterpret_cast<uint64_t*>(diagonals[b].mutable_data_ptr<int64_t>()),
        column_positions[b].mutable_data_ptr<int64_t>(),
        column_counts[b].mutable_data_ptr<int32_t>(), visited[b].mutable_data_ptr<int64_t>()));
  }
  const auto all = [](const std::vector<torch::Tensor>& of_sequences) {
    return of_sequences.size() == 1 ? of_sequences[0].unsqueeze(0) : torch::stack(of_sequences);
  };
  return {all(diagonals), all(column_positions), all(column_counts), visited};
}

// Lists of the whole batch: sequences follow each other as heads do, where they hold no documents.
template <typename Engine>
std::tuple<torch::Tensor, torch::Tensor, torch::Tensor, torch::Tensor> TileListsOf(
    Engine& engine, const torch::Tensor& chosen, int64_t tokens, int64_t tile, int64_t block_size,
    int64_t capacity) {
  CheckTile(tile);
  CheckBlockSize("block_size", block_size, tile);
  const int64_t tiles = (tokens + tile - 1) / tile, blocks = (tokens + block_size - 1) / block_size;
  TORCH_CHECK(chosen.dim() == 4 && chosen.size(2) == tiles &&
                  chosen.size(3) == BlockWords(static_cast<int32_t>(blocks)) &&
                  chosen.scalar_type() == torch::kInt && chosen.is_contiguous(),
              "chosen is ", chosen.toString(), " ", chosen.sizes(), "; for ", tokens,
              " tokens it must be dense int32 [batch, heads, ", tiles, ", ",
              BlockWords(static_cast<int32_t>(blocks)), "]");
  TORCH_CHECK(capacity > 0 && capacity < (int64_t{1} << 31), "capacity is ", capacity,
              "; lists hold 1 to 2^31 - 1 tiles: take larger tiles, or fewer sequences a call");
  const auto ints = chosen.options();
  const torch::Tensor row_offsets = torch::empty({chosen.size(0), chosen.size(1), tiles + 1}, ints),
                      columns = torch::empty({capacity}, ints),
                      column_offsets = torch::empty_like(row_offsets),
                      rows = torch::empty({capacity}, ints);
  Check(engine.BuildLists(chosen, tokens, tile, block_size, row_offsets, columns, column_offsets,
                          rows));
  return {row_offsets, columns, column_offsets, rows};
}

}  // namespace ringleader::kernels::ops
