// Masks that are intervals of keys for each query (TileSelection::intervals): the check of what
// callers pass, and what a mask says of a tile.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/reference/tiles/tile_lists.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::reference {

// INVALID_ARGUMENT where a bound is below the one before it or outside of the sequence, and where
// the selection has what intervals do not go with. `tokens` queries of layout `query`.
absl::Status CheckIntervals(const TileSelection& tiles, const ShardLayout& query, int64_t tokens);

// Whether one of the queries sees a key of the tile, and whether all of them see all of its keys.
bool SeesSome(std::span<const KeyIntervals> queries, const TileSpan& key);
bool SeesAll(std::span<const KeyIntervals> queries, const TileSpan& key);

}  // namespace ringleader::kernels::reference
