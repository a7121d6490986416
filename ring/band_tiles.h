// How many tiles patterns that do not depend on the data visit, counted without listing them.
#pragma once

#include <cstdint>

#include "ringleader/kernels/shard_layout.h"

namespace ringleader::ring {

// Tiles at or below the diagonal of `mine`'s queries against the whole sequence, one head.
int64_t CausalTiles(const kernels::ShardLayout& mine, int tile);

// Tiles of `query`'s queries and `key`'s keys that hold a visible pair, one head. window: tokens
// that a query sees; 0: all before it. document_starts: TileSelection's, of `query`'s queries; may
// be null.
int64_t BandTiles(const kernels::ShardLayout& query, const kernels::ShardLayout& key, int tile,
                  int64_t window, const int32_t* document_starts);

}  // namespace ringleader::ring
