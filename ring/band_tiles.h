// How many tiles patterns that do not depend on the data visit, counted without listing them.
#pragma once

#include <cstdint>

#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::ring {

// The first `tokens` of the tokens that a rank has by `layout`: all of them, as a rule.
struct Shard {
  kernels::ShardLayout layout;
  int64_t tokens = 0;

  Shard(const kernels::ShardLayout& all) : layout(all), tokens(all.local_tokens()) {}  // NOLINT
  Shard(const kernels::ShardLayout& by, int64_t held) : layout(by), tokens(held) {}
};

// Tiles at or below the diagonal of `mine`'s queries against the whole sequence, one head.
int64_t CausalTiles(const kernels::ShardLayout& mine, int tile);

// Tiles of `query`'s queries and `key`'s keys that hold a visible pair, one head. window: tokens
// that a query sees; 0: all before it. document_starts: TileSelection's, of `query`'s queries; may
// be null.
int64_t BandTiles(const Shard& query, const Shard& key, int tile, int64_t window,
                  const int32_t* document_starts);

// The same where `visible`, TileSelection::intervals of `query`'s queries, says what they see.
int64_t VisibleTiles(const Shard& query, const Shard& key, int tile,
                     const kernels::KeyIntervals* visible);

}  // namespace ringleader::ring
