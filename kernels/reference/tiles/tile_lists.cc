#include "kernels/reference/tiles/tile_lists.h"

#include <algorithm>
#include <span>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/reference/tiles/document_starts.h"
#include "kernels/reference/tiles/key_intervals.h"

namespace ringleader::kernels::reference {

namespace {

// A tile's tokens must follow each other in the sequence; listed tiles must be whole blocks of it.
absl::Status CheckLayout(const char* side, const ShardLayout& layout, const TileSelection& tiles) {
  if (layout.ranks == 1) return absl::OkStatus();
  const bool listed = tiles.pattern == TilePattern::kToeplitz || tiles.pattern == TilePattern::kCsr;
  int64_t chunk = layout.local_tokens();
  if (layout.kind == LayoutKind::kStriped) chunk = layout.stripe;
  if (layout.kind == LayoutKind::kZigzag) chunk = layout.tokens / (int64_t{2} * layout.ranks);
  const bool one_chunk = layout.kind == LayoutKind::kContiguous;
  if (chunk <= 0 || (chunk % tiles.tile != 0 && (listed || !one_chunk))) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s layout: chunks of %d tokens are not whole tiles of %d; choose a sequence length or "
        "stripe that is a multiple of the tile",
        side, chunk, tiles.tile));
  }
  return absl::OkStatus();
}

bool IsKnown(TilePattern pattern) {
  switch (pattern) {
    case TilePattern::kFull:
    case TilePattern::kCausal:
    case TilePattern::kWindow:
    case TilePattern::kToeplitz:
    case TilePattern::kCsr:
      return true;
  }
  return false;
}

absl::Status CheckSelection(const TileSelection& tiles, int64_t blocks, int heads,
                            int64_t query_tiles) {
  if (!IsKnown(tiles.pattern)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("tiles.pattern is %d; see TilePattern", static_cast<int>(tiles.pattern)));
  }
  if (tiles.tile <= 0 || tiles.tile > 128) {
    return absl::InvalidArgumentError(
        absl::StrFormat("tile is %d; allowed are 1 to 128 tokens", tiles.tile));
  }
  if (tiles.pattern == TilePattern::kWindow && tiles.window < 1) {
    return absl::InvalidArgumentError("window must be at least 1 token");
  }
  const bool groups_alone = tiles.groups.groups != nullptr && tiles.diagonals == nullptr;
  if (tiles.pattern == TilePattern::kToeplitz && !groups_alone &&
      (tiles.diagonals == nullptr || int64_t{tiles.diagonal_words} * 64 < blocks)) {
    return absl::InvalidArgumentError(absl::StrFormat("diagonals has %d words; %d blocks need %d",
                                                      tiles.diagonal_words, blocks,
                                                      (blocks + 63) / 64));
  }
  // Without a single tile there may be no memory for the columns.
  if (tiles.pattern == TilePattern::kCsr &&
      (tiles.row_offsets == nullptr ||
       (tiles.columns == nullptr && tiles.row_offsets[heads * (query_tiles + 1) - 1] > 0))) {
    return absl::InvalidArgumentError("kCsr needs row_offsets and columns");
  }
  if (tiles.choice.chosen != nullptr &&
      (tiles.pattern != TilePattern::kCsr || tiles.tile % 32 != 0 ||
       tiles.choice.block_size < tiles.tile || tiles.choice.block_size % tiles.tile != 0)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "choice of blocks of %d goes with kCsr and tiles that are whole words of 32 queries and "
        "parts of a block; pattern is %d, tile %d",
        tiles.choice.block_size, static_cast<int>(tiles.pattern), tiles.tile));
  }
  const KeyGroups& groups = tiles.groups;
  if (groups.groups != nullptr &&
      (tiles.pattern != TilePattern::kToeplitz || tiles.tile != kGroupTile)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("groups go with kToeplitz and tiles of %d; pattern is %d, tile %d",
                        kGroupTile, static_cast<int>(tiles.pattern), tiles.tile));
  }
  if (groups.groups != nullptr && (groups.begins == nullptr || groups.ends == nullptr)) {
    return absl::InvalidArgumentError("groups need begins and ends");
  }
  if (groups.heads_together < 1 || heads % groups.heads_together != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "groups have rows of %d heads each; there are %d", groups.heads_together, heads));
  }
  return absl::OkStatus();
}

// Adds the tiles that hold a group of row [head, query tile] to the end of `list`, where the
// pattern's tiles of that row are from `begin` on. `query`: the positions of the tile's queries.
absl::Status AddGroups(const KeyGroups& groups, int64_t row, const TileSpan& query,
                       const ShardLayout& key, int64_t key_tokens, int64_t begin, TileList& list) {
  const int32_t first = groups.begins[row], end = groups.ends[row];
  if (first < 0 || end < first || end > groups.capacity) {
    return absl::InvalidArgumentError(
        absl::StrFormat("groups of row %d are from %d to %d; rows have room for %d", row, first,
                        end, groups.capacity));
  }
  const auto own = std::ssize(list.columns);
  for (int32_t i = first, last = -1; i < end; ++i) {
    const int32_t group = groups.groups[row * groups.capacity + i];
    const int64_t last_key = (int64_t{group} + 1) * kGroupKeys - 1;
    if (group <= last || last_key >= key_tokens || key.Position(last_key) >= query.first) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "groups of row %d: %d is out of order or not before the tile's first query, at %d", row,
          group, query.first));
    }
    last = group;
    const auto b = static_cast<int32_t>(group / (kGroupTile / kGroupKeys));
    const auto columns = std::span(list.columns).subspan(begin);
    if (std::ssize(list.columns) > own && columns.back() == b) continue;
    if (std::ranges::binary_search(columns.first(own - begin), b)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "groups of row %d: %d lies in a tile that the diagonals cover", row, group));
    }
    list.columns.push_back(b);
  }
  std::inplace_merge(list.columns.begin() + begin, list.columns.begin() + own, list.columns.end());
  return absl::OkStatus();
}

}  // namespace

PositionBand BandOf(const TileSelection& tiles) {
  switch (tiles.pattern) {
    case TilePattern::kFull:
      return {};
    case TilePattern::kWindow:
      return {.lowest = 0, .highest = tiles.window - 1};
    case TilePattern::kCausal:
    case TilePattern::kToeplitz:
      return {.lowest = 0};
    case TilePattern::kCsr:
      if (tiles.intervals != nullptr) return {};
      return {.lowest = 0};
  }
  return {.lowest = 0};  // CheckSelection() has refused any other
}

TransposedTileList Transpose(const TileList& list, int64_t key_tiles) {
  TransposedTileList result;
  result.column_offsets.assign(key_tiles + 1, 0);
  for (const int32_t column : list.columns) ++result.column_offsets[column + 1];
  for (int64_t b = 0; b < key_tiles; ++b) {
    result.column_offsets[b + 1] += result.column_offsets[b];
  }
  result.rows.resize(list.columns.size());
  result.turns.resize(list.columns.size());
  std::vector<int64_t> next(result.column_offsets.begin(), result.column_offsets.end() - 1);
  for (int64_t row = 0; row < list.rows(); ++row) {
    for (int64_t i = list.row_offsets[row]; i < list.row_offsets[row + 1]; ++i) {
      const int64_t slot = next[list.columns[i]]++;
      result.rows[slot] = static_cast<int32_t>(row);
      result.turns[slot] = static_cast<int32_t>(i - list.row_offsets[row]);
    }
  }
  return result;
}

absl::StatusOr<TileLists> TileLists::Build(const TileSelection& tiles, const ShardLayout& query,
                                           const ShardLayout& key, int64_t query_tokens,
                                           int64_t key_tokens, int heads) {
  const int64_t blocks = TileCount(query.tokens, std::max(tiles.tile, 1));
  const int64_t query_tiles = TileCount(query_tokens, std::max(tiles.tile, 1));
  RETURN_IF_ERROR(CheckSelection(tiles, blocks, heads, query_tiles));
  RETURN_IF_ERROR(CheckLayout("query", query, tiles));
  RETURN_IF_ERROR(CheckLayout("key", key, tiles));
  RETURN_IF_ERROR(CheckDocuments(tiles, query, query_tokens));
  RETURN_IF_ERROR(CheckIntervals(tiles, query, query_tokens));
  const int64_t key_tiles = TileCount(key_tokens, tiles.tile);
  const PositionBand band = BandOf(tiles);
  std::vector<TileSpan> keys(key_tiles);
  for (int64_t b = 0; b < key_tiles; ++b) keys[b] = SpanOfTile(key, key_tokens, tiles.tile, b);

  const bool per_head =
      tiles.pattern == TilePattern::kToeplitz || tiles.pattern == TilePattern::kCsr;
  TileLists result;
  result.lists_.resize(per_head ? heads : 1);
  for (size_t head = 0; head < result.lists_.size(); ++head) {
    TileList& list = result.lists_[head];
    list.row_offsets.reserve(query_tiles + 1);
    list.row_offsets.push_back(0);
    const uint64_t* diagonals =
        tiles.diagonals == nullptr ? nullptr : tiles.diagonals + head * tiles.diagonal_words;
    for (int64_t a = 0; a < query_tiles; ++a) {
      const TileSpan span = SpanOfTile(query, query_tokens, tiles.tile, a);
      // The first row's document is the first to start: keys before it are nobody's.
      const int64_t start =
          tiles.document_starts == nullptr ? 0 : tiles.document_starts[a * tiles.tile];
      const auto touches = [&](const TileSpan& key) {
        if (tiles.intervals != nullptr) {
          const std::span rows(tiles.intervals + a * tiles.tile, span.tokens());
          return SeesSome(rows, key);
        }
        return band.Touches(span, key) && key.last >= start;
      };
      if (tiles.pattern == TilePattern::kCsr) {
        const int32_t* offsets = tiles.row_offsets + head * (query_tiles + 1) + a;
        for (int32_t i = offsets[0], last = -1; i < offsets[1]; ++i) {
          const int32_t b = tiles.columns[i];
          if (b <= last || b >= key_tiles) {
            return absl::InvalidArgumentError(absl::StrFormat(
                "columns of head %d, query tile %d: %d is out of order or not below %d", head, a, b,
                key_tiles));
          }
          last = b;
          if (touches(keys[b])) list.columns.push_back(b);
        }
      } else if (tiles.groups.groups == nullptr || tiles.diagonals != nullptr) {
        for (int64_t b = 0; b < key_tiles; ++b) {
          if (!touches(keys[b])) continue;
          if (tiles.pattern == TilePattern::kToeplitz) {
            const int64_t delta = span.first / tiles.tile - keys[b].first / tiles.tile;
            if ((diagonals[delta / 64] >> (delta % 64) & 1) == 0) continue;
          }
          list.columns.push_back(static_cast<int32_t>(b));
        }
      }
      const int64_t begin = list.row_offsets.back();
      result.total_tiles_ += (per_head ? 1 : heads) * (std::ssize(list.columns) - begin);
      if (tiles.groups.groups != nullptr) {
        const int64_t row = tiles.groups.RowOf(head, a, query_tiles);
        RETURN_IF_ERROR(AddGroups(tiles.groups, row, span, key, key_tokens, begin, list));
        result.total_tiles_ +=
            TilesOfGroups(tiles.groups.ends[row]) - TilesOfGroups(tiles.groups.begins[row]);
      }
      list.row_offsets.push_back(static_cast<int64_t>(list.columns.size()));
    }
  }
  return result;
}

}  // namespace ringleader::kernels::reference
