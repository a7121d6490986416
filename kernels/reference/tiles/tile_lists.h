// The tiles that a call visits, written out as lists from any TileSelection.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::reference {

// Positions [first, last] of a tile's tokens; they are consecutive.
struct TileSpan {
  int64_t first = 0;
  int64_t last = 0;
  int tokens() const { return static_cast<int>(last - first + 1); }
};

inline int64_t TileCount(int64_t tokens, int tile) {
  return (tokens + tile - 1) / tile;
}

inline TileSpan SpanOfTile(const ShardLayout& layout, int64_t tokens, int tile, int64_t index) {
  const int64_t begin = index * tile, end = begin + tile < tokens ? begin + tile : tokens;
  return {layout.Position(begin), layout.Position(end - 1)};
}

// Which positions of a (query, key) pair attend: lowest <= query - key <= highest.
struct PositionBand {
  int64_t lowest = std::numeric_limits<int64_t>::min();
  int64_t highest = std::numeric_limits<int64_t>::max();

  bool Touches(const TileSpan& query, const TileSpan& key) const {
    return query.last - key.first >= lowest && query.first - key.last <= highest;
  }
  bool Covers(const TileSpan& query, const TileSpan& key) const {
    return query.first - key.last >= lowest && query.last - key.first <= highest;
  }
};
PositionBand BandOf(const TileSelection& tiles);

// One head's tiles by query tile, ascending in both.
struct TileList {
  std::vector<int64_t> row_offsets;  // [query tiles + 1]
  std::vector<int32_t> columns;

  int64_t rows() const { return static_cast<int64_t>(row_offsets.size()) - 1; }
  int64_t RowLength(int64_t row) const { return row_offsets[row + 1] - row_offsets[row]; }
};

// The same by key tile. `turn` is the place of the key tile in its query tile's row: the order in
// which a query tile's sums are made.
struct TransposedTileList {
  std::vector<int64_t> column_offsets;  // [key tiles + 1]
  std::vector<int32_t> rows;
  std::vector<int32_t> turns;
};
TransposedTileList Transpose(const TileList& list, int64_t key_tiles);

// Lists of all heads; patterns that do not look at heads share one.
class TileLists {
 public:
  // INVALID_ARGUMENT where selection and layouts do not fit: tiles that are not whole blocks of the
  // sequence, missing or unordered lists, groups that are not before their queries or are visited
  // already, wrong document starts. Tiles without a pair that attends are left out; those that hold
  // a group are listed.
  static absl::StatusOr<TileLists> Build(const TileSelection& tiles, const ShardLayout& query,
                                         const ShardLayout& key, int64_t query_tokens,
                                         int64_t key_tokens, int heads);

  const TileList& OfHead(int head) const { return lists_[lists_.size() == 1 ? 0 : head]; }
  bool shared() const { return lists_.size() == 1; }
  // The number of tiles of all heads; of groups TilesOfGroups.
  int64_t TotalTiles() const { return total_tiles_; }

 private:
  int64_t total_tiles_ = 0;
  std::vector<TileList> lists_;
};

}  // namespace ringleader::kernels::reference
