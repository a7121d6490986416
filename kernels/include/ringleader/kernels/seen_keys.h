// The keys that each local query sees, as the steps of an index read them, on the CPU and on GPUs.
#pragma once

#include <cstdint>
#include <limits>

#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels {

// Documents under a causal mask, or a mask of one interval of keys for each query. Neither bound
// falls from one query to the next, and each query sees itself, so that what the queries of a tile
// see between them is one interval, from the first one's begin to the last one's end.
struct SeenKeys {
  const int32_t* document_starts = nullptr;  // [n]: TileSelection's; null: one document
  // [n]: TileSelection's, whose second intervals are empty, in place of document_starts. Null: a
  // query sees nothing behind itself.
  const KeyIntervals* intervals = nullptr;

  // The position of the first key that local query `i` sees.
  RINGLEADER_HOST_DEVICE int64_t Begin(int64_t i) const {
    if (intervals != nullptr) return intervals[i].begin;
    return document_starts == nullptr ? 0 : document_starts[i];
  }
  // That of the last one; `layout` is the queries'.
  RINGLEADER_HOST_DEVICE int64_t Last(const ShardLayout& layout, int64_t i) const {
    return intervals != nullptr ? intervals[i].end - 1 : layout.Position(i);
  }
};

// The position of the last key that local tile `a` of `tile` queries, which `layout` deals in whole
// tiles, sees between them or, where nothing behind a query is seen, of its first query.
RINGLEADER_HOST_DEVICE inline int64_t LastKeyOf(const SeenKeys& seen, const ShardLayout& layout,
                                                int64_t a, int32_t tile) {
  const int64_t query = a * tile, behind = query + tile;
  if (seen.intervals == nullptr) return layout.Position(query);  // in the same tile
  const int64_t held = layout.local_tokens();
  return seen.Last(layout, (behind < held ? behind : held) - 1);
}

// Whether local tile `a` of queries sees a key of the tile whose first key is at `key`.
RINGLEADER_HOST_DEVICE inline bool SeesTile(const SeenKeys& seen, const ShardLayout& layout,
                                            int64_t a, int32_t tile, int64_t key) {
  return key + tile > seen.Begin(a * tile) && key <= LastKeyOf(seen, layout, a, tile);
}

// The keys that a mean counts. Under a causal mask the queries behind a block that see a key of it
// are all of one document, that of its last key: the others have ended. So the mean of a block
// counts the keys of that document alone. Padding at the sequence's end is a document of its own
// there; under another mask it is left out, so that as much of it as there is changes nothing.
struct MeanKeys {
  static constexpr int32_t kTokens = 64;  // of which tiles and blocks are whole numbers

  // [tokens of the sequence / kTokens, rounded up]: the position where the document of the last of
  // each kTokens keys starts. Null: all keys count.
  const int32_t* starts = nullptr;
  // The position where padding begins, where `starts` is null.
  int64_t content = std::numeric_limits<int64_t>::max();

  // The position of the first of the keys [begin, end) that their mean counts.
  // `end` is a multiple of kTokens or where the sequence ends.
  RINGLEADER_HOST_DEVICE int64_t First(int64_t begin, int64_t end) const {
    const int64_t start = starts == nullptr ? 0 : starts[(end - 1) / kTokens];
    return start > begin ? start : begin;
  }
  // The position behind the last of them. Keys that are all padding, which nobody sees, count all.
  RINGLEADER_HOST_DEVICE int64_t End(int64_t begin, int64_t end) const {
    return starts == nullptr && begin < content && content < end ? content : end;
  }
};

// The blocks of keys that a tile of queries sees, first and last included, and its own.
struct SeenBlocks {
  int32_t first = 0, own = 0, last = 0;

  RINGLEADER_HOST_DEVICE int32_t count() const { return last - first + 1; }
};

// Of local tile `a`; a block has `block_size` keys, a multiple of `tile`.
RINGLEADER_HOST_DEVICE inline SeenBlocks SeenBlocksOf(const SeenKeys& seen,
                                                      const ShardLayout& layout, int64_t a,
                                                      int32_t tile, int32_t block_size) {
  return {.first = static_cast<int32_t>(seen.Begin(a * tile) / block_size),
          .own = static_cast<int32_t>(layout.Position(a * tile) / block_size),
          .last = static_cast<int32_t>(LastKeyOf(seen, layout, a, tile) / block_size)};
}

}  // namespace ringleader::kernels
