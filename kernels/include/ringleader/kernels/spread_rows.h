// Tiles of fewer queries than kernels take rows: how these are laid out for them.
#pragma once

#include <cstdint>

#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels {

// Tiles of `tile` queries take kGroupTile rows each: a tile's queries, then padding without a say.
// With tiles of kGroupTile queries rows are queries.
struct SpreadRows {
  int32_t tile = kGroupTile;  // a power of two, at most kGroupTile

  RINGLEADER_HOST_DEVICE bool is_spread() const { return tile < kGroupTile; }
  RINGLEADER_HOST_DEVICE int64_t Tiles(int64_t queries) const {
    return (queries + tile - 1) / tile;
  }
  RINGLEADER_HOST_DEVICE int64_t Rows(int64_t queries) const {
    return is_spread() ? Tiles(queries) * kGroupTile : queries;
  }
  RINGLEADER_HOST_DEVICE int64_t RowOf(int64_t query) const {
    return is_spread() ? query / tile * kGroupTile + query % tile : query;
  }
  // The query of a row or, of padding, the last one before it that its tile may have. Of 32 bits,
  // without a sign, where registers are few.
  template <typename Row>
  RINGLEADER_HOST_DEVICE Row QueryOf(Row row) const {
    const Row within = row % kGroupTile, last = static_cast<Row>(tile - 1);
    return row / kGroupTile * static_cast<Row>(tile) + (within < last ? within : last);
  }
  // Tiles of kGroupTile that the groups before the `place`-th of row [head, tile of `queries`] are
  // counted as in reports, as TilesOfGroups: rows of few queries have few pairs, and are rounded up
  // and down in turn, by where they are in the sequence.
  RINGLEADER_HOST_DEVICE int32_t TilesOfGroups(const ShardLayout& queries, int64_t row,
                                               int32_t place) const {
    if (!is_spread()) return kernels::TilesOfGroups(place);
    const int32_t groups = kGroupTile * kGroupTile / (tile * kGroupKeys);  // of a tile
    const int64_t tiles = Tiles(queries.local_tokens()),
                  of_sequence = queries.Position(row % tiles * tile) / tile;
    return (place + static_cast<int32_t>((of_sequence + row / tiles) % groups)) / groups;
  }
  // What the tiles' own keys are counted as: as many pairs.
  int64_t OwnTiles(int64_t queries) const {
    const int64_t share = kGroupTile / tile, of_tile = share * share;
    return (Tiles(queries) + of_tile - 1) / of_tile;
  }
  // A layout of the rows of queries that `queries` deals in whole tiles of kGroupTile. Its
  // positions are those of rows in the sequence's: none of a tile's is before the position of its
  // first query.
  ShardLayout LayoutOf(ShardLayout queries) const {
    queries.tokens = queries.ranks == 1 ? Rows(queries.tokens) : queries.tokens / tile * kGroupTile;
    queries.stripe = queries.stripe / tile * kGroupTile;
    return queries;
  }
};

}  // namespace ringleader::kernels
