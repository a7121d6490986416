#include "ring/band_tiles.h"

#include <algorithm>

namespace ringleader::ring {

using kernels::ShardLayout;

namespace {

// The first of [0, count) for which `holds`, which stays true once it is.
template <typename Predicate>
int64_t FirstWhere(int64_t count, Predicate holds) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (holds(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Tiles of `key` that hold a position of [first, end).
int64_t TilesWithin(const Shard& key, int tile, int64_t first, int64_t end) {
  const int64_t keys = key.tokens, key_tiles = (keys + tile - 1) / tile;
  // Positions grow with the local index, so these are a run.
  const int64_t behind =
      FirstWhere(key_tiles, [&](int64_t b) { return key.layout.Position(b * tile) >= end; });
  const int64_t start = FirstWhere(key_tiles, [&](int64_t b) {
    return key.layout.Position(std::min(keys, (b + 1) * tile) - 1) >= first;
  });
  return std::max<int64_t>(0, behind - start);
}

}  // namespace

int64_t CausalTiles(const ShardLayout& mine, int tile) {
  int64_t tiles = 0;
  for (int64_t i = 0; i < mine.local_tokens(); i += tile) tiles += mine.Position(i) / tile + 1;
  return tiles;
}

int64_t BandTiles(const Shard& query, const Shard& key, int tile, int64_t window,
                  const int32_t* document_starts) {
  int64_t tiles = 0;
  for (int64_t begin = 0; begin < query.tokens; begin += tile) {
    const int64_t first = query.layout.Position(begin);
    const int64_t last = query.layout.Position(std::min(query.tokens, begin + tile) - 1);
    // The first key that the tile's first query, and so any, sees.
    int64_t first_seen = window == 0 ? 0 : first - window + 1;
    if (document_starts != nullptr) {
      first_seen = std::max<int64_t>(first_seen, document_starts[begin]);
    }
    tiles += TilesWithin(key, tile, first_seen, last + 1);
  }
  return tiles;
}

int64_t VisibleTiles(const Shard& query, const Shard& key, int tile,
                     const kernels::KeyIntervals* visible) {
  int64_t tiles = 0;
  for (int64_t begin = 0; begin < query.tokens; begin += tile) {
    const int64_t end = std::min(query.tokens, begin + tile);
    // A tile's positions follow each other, and every query sees itself: together they see a run.
    int64_t first_seen = visible[begin].begin, behind = visible[begin].end;
    for (int64_t i = begin + 1; i < end; ++i) {
      first_seen = std::min<int64_t>(first_seen, visible[i].begin);
      behind = std::max<int64_t>(behind, visible[i].end);
    }
    tiles += TilesWithin(key, tile, first_seen, behind);
  }
  return tiles;
}

}  // namespace ringleader::ring
