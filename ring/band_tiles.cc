#include "ring/band_tiles.h"

#include <algorithm>
#include <span>
#include <vector>

#include "base/numbers/ceil_div.h"

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

struct Run {
  int64_t begin = 0, end = 0;
  int64_t count() const { return std::max<int64_t>(0, end - begin); }
};

// The tiles of `key` that hold a position of [first, end).
Run TilesWithin(const Shard& key, int tile, int64_t first, int64_t end) {
  const int64_t keys = key.tokens, key_tiles = CeilDiv(keys, tile);
  // Positions grow with the local index, so these are a run.
  const int64_t behind =
      FirstWhere(key_tiles, [&](int64_t b) { return key.layout.Position(b * tile) >= end; });
  const int64_t start = FirstWhere(key_tiles, [&](int64_t b) {
    return key.layout.Position(std::min(keys, (b + 1) * tile) - 1) >= first;
  });
  return {start, behind};
}

// The positions that these queries see together: ascending runs, apart from each other.
void FindSeen(std::span<const kernels::KeyIntervals> queries, std::vector<Run>* runs) {
  runs->clear();
  for (const kernels::KeyIntervals& row : queries) {
    for (const Run& seen : {Run{row.begin, row.end}, Run{row.second_begin, row.second_end}}) {
      if (seen.count() == 0) continue;
      // Most masks' rows go on where the one before is: a handful of runs is left to be sorted.
      if (!runs->empty() && runs->back().begin <= seen.begin && seen.begin <= runs->back().end) {
        runs->back().end = std::max(runs->back().end, seen.end);
      } else {
        runs->push_back(seen);
      }
    }
  }
  std::ranges::sort(*runs, {}, &Run::begin);
  size_t joined = 0;
  for (const Run& run : *runs) {
    if (joined > 0 && run.begin <= (*runs)[joined - 1].end) {
      (*runs)[joined - 1].end = std::max((*runs)[joined - 1].end, run.end);
    } else {
      (*runs)[joined++] = run;
    }
  }
  runs->resize(joined);
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
    tiles += TilesWithin(key, tile, first_seen, last + 1).count();
  }
  return tiles;
}

int64_t VisibleTiles(const Shard& query, const Shard& key, int tile,
                     const kernels::KeyIntervals* visible) {
  int64_t tiles = 0;
  std::vector<Run> seen;
  for (int64_t begin = 0; begin < query.tokens; begin += tile) {
    FindSeen({visible + begin, visible + std::min(query.tokens, begin + tile)}, &seen);
    Run counted;
    for (const Run& run : seen) {
      Run within = TilesWithin(key, tile, run.begin, run.end);
      within.begin = std::max(within.begin, counted.end);
      tiles += within.count();
      if (within.count() > 0) counted = within;
    }
  }
  return tiles;
}

}  // namespace ringleader::ring
