#include "worker/attention/testing/visited.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "ringleader/kernels/block_choice.h"

namespace ringleader::attention::testing {

using kernels::TilePattern;
using patterns::LayerIndex;

namespace {

bool OnDiagonalOrColumn(const LayerIndex& index, int head, int64_t query, int64_t key) {
  const int64_t delta = query / index.tile - key / index.tile;
  const uint64_t* const words = index.diagonals.data() + int64_t{head} * index.diagonal_words;
  const int64_t queries = index.group_tiles.tile;
  if (index.group_tiles.is_spread()) return query / queries == key / queries;
  if ((words[delta / 64] >> (delta % 64) & 1) != 0) return true;
  if (!index.has_columns()) return false;
  const int64_t* const columns = index.column_positions.data() + int64_t{head} * index.max_columns;
  return std::binary_search(columns, columns + index.column_counts.data()[head], key);
}

// `local`: the query's place on its rank, of `queries`.
bool InGroup(const LayerIndex& index, const kernels::ShardLayout& layout, int head, int64_t local,
             int64_t key) {
  if (!index.has_groups()) return false;
  const kernels::ChosenGroups groups = index.Groups();
  const int64_t tiles = index.group_tiles.Tiles(layout.local_tokens()), tile = local / groups.tile,
                group = key / kernels::kGroupKeys;
  const int64_t word = groups.rows[tile] + group / 32;
  return word < groups.rows[tile + 1] &&
         (groups.chosen[head / groups.heads_together * groups.rows[tiles] + word] >> group % 32 &
          1) != 0;
}

// `local`: the query's place on its rank, of `queries`.
bool InChosenBlock(const LayerIndex& index, int head, int64_t local, int64_t queries,
                   int64_t tokens, int64_t key) {
  const int64_t tiles = (queries + index.tile - 1) / index.tile;
  const auto blocks = static_cast<int32_t>((tokens + index.block_size - 1) / index.block_size);
  const int64_t block = key / index.block_size, words = kernels::BlockWords(blocks);
  if (index.queries_chosen.size > 0) {  // queries choose apart
    const int64_t word =
        (head * int64_t{blocks} + block) * kernels::QueryWords(queries) + local / 32;
    return (index.queries_chosen.data()[word] >> (local % 32) & 1) != 0;
  }
  const int64_t row = head * tiles + local / index.tile;
  return (index.chosen.data()[row * words + block / 32] >> (block % 32) & 1) != 0;
}

}  // namespace

Visited::Visited(std::vector<std::shared_ptr<const LayerIndex>> indices,
                 const kernels::ShardLayout& layout, std::vector<int64_t> firsts)
    : indices_(std::move(indices)), layout_(layout), firsts_(std::move(firsts)) {}

bool Visited::operator()(int head, int64_t query, int64_t key) const {
  const auto after = std::upper_bound(firsts_.begin(), firsts_.end(), query);
  if (key > query || (after != firsts_.begin() && key < *(after - 1))) return false;
  const LayerIndex& index = *indices_.at(layout_.Owner(query));
  switch (index.pattern) {
    case TilePattern::kFull:
    case TilePattern::kCausal:
      return true;
    case TilePattern::kWindow:
      return query - key < index.window;
    case TilePattern::kToeplitz:
      return OnDiagonalOrColumn(index, head, query, key) ||
             InGroup(index, layout_, head, layout_.LocalIndex(query), key);
    case TilePattern::kCsr:
      return InChosenBlock(index, head, layout_.LocalIndex(query), layout_.local_tokens(),
                           layout_.tokens, key);
  }
  std::abort();
}

}  // namespace ringleader::attention::testing
