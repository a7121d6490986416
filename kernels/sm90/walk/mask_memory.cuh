// What a call makes of TileSelection::intervals before its kernel starts: it says in this owner's
// keys, and by tiles, what the intervals say in positions of the sequence.
#pragma once

#include <cstdint>

#include "kernels/sm90/walk/interval_walk.cuh"
#include "kernels/sm90/walk/tile_walk.cuh"

namespace ringleader::kernels::sm90 {

// Where the parts of a call's mask memory are, in LineBits from its beginning: the intervals of all
// queries in local keys, the bits by query tile, and those by key tile.
struct MaskMemory {
  static constexpr int64_t kRowLineBits = sizeof(KeyIntervals) / sizeof(LineBits);
  int64_t by_row = 0, by_column = 0, end = 0;

  RINGLEADER_HOST_DEVICE MaskMemory(int32_t query_tokens, int32_t query_tiles, int32_t key_tiles)
      : by_row(kRowLineBits * query_tokens),
        by_column(by_row + int64_t{query_tiles} * LineWords(key_tiles)),
        end(by_column + int64_t{key_tiles} * LineWords(query_tiles)) {}
  int64_t bytes() const { return end * int64_t{sizeof(LineBits)}; }
};

#if defined(__CUDACC__)

// How many keys of an owner lie before `position`.
__device__ __forceinline__ int32_t KeysBefore(const PositionMap& keys, int32_t tokens,
                                              int32_t position) {
  const auto of_chunk = [&](int32_t first) { return min(max(position - first, 0), keys.chunk); };
  int32_t before = 0;
  switch (keys.kind) {
    case LayoutKind::kContiguous:
      before = of_chunk(keys.rank * keys.chunk);
      break;
    case LayoutKind::kZigzag:
      before = of_chunk(keys.rank * keys.chunk) +
               of_chunk((2 * keys.ranks - 1 - keys.rank) * keys.chunk);
      break;
    case LayoutKind::kStriped: {
      const int32_t round = max(position, 0) / (keys.chunk * keys.ranks);
      before = round * keys.chunk + of_chunk((round * keys.ranks + keys.rank) * keys.chunk);
      break;
    }
  }
  return min(before, tokens);
}

// Bits of tiles [begin, end) among those of a word.
__device__ __forceinline__ uint32_t BitsOfTiles(int32_t begin, int32_t end, int32_t word) {
  const auto below = [&](int32_t tile) {
    const int32_t count = min(max(tile - 32 * word, 0), 32);
    return count == 32 ? 0xFFFFFFFFu : (1u << count) - 1;
  };
  return below(end) & ~below(begin);
}

// The tiles that an interval of local keys touches, and those that it covers: of the last one,
// where it is shorter, only what there is of it, and it counts as not covered.
struct TilesOfInterval {
  int32_t touched_begin, touched_end, covered_begin, covered_end;

  __device__ TilesOfInterval(int32_t begin, int32_t end, int32_t tile_log2) {
    const int32_t last = (1 << tile_log2) - 1;
    touched_begin = begin >> tile_log2;
    touched_end = begin < end ? (end + last) >> tile_log2 : touched_begin;
    covered_begin = (begin + last) >> tile_log2;
    covered_end = max(end >> tile_log2, covered_begin);
  }
  __device__ TilesOfInterval OfLane(int lane) const {
    TilesOfInterval other = *this;
    other.touched_begin = __shfl_sync(0xFFFFFFFFu, touched_begin, lane);
    other.touched_end = __shfl_sync(0xFFFFFFFFu, touched_end, lane);
    other.covered_begin = __shfl_sync(0xFFFFFFFFu, covered_begin, lane);
    other.covered_end = __shfl_sync(0xFFFFFFFFu, covered_end, lane);
    return other;
  }
  __device__ bool operator==(const TilesOfInterval& other) const {
    return touched_begin == other.touched_begin && touched_end == other.touched_end &&
           covered_begin == other.covered_begin && covered_end == other.covered_end;
  }
};

// Writes, of the query tile `row`, the intervals in local keys and the bits of its line. Bounds
// that do not ascend are raised to the one before them. A whole warp calls.
__device__ __forceinline__ void MarkRow(const TileWalk& walk, const KeyIntervals* given,
                                        LineBits* memory, const MaskMemory& at, int32_t row) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), words = LineWords(walk.key_tiles);
  for (int32_t first_word = 0; first_word < words; first_word += 32) {
    const int32_t word = first_word + lane;
    LineBits bits = {0, 0xFFFFFFFFu};
    for (int32_t part = 0; part < walk.tile(); part += 32) {
      const int32_t query = (row << walk.tile_log2) + part + lane;
      const bool exists = query < walk.query_tokens;
      int4 keys = {0, 0, 0, 0};
      if (exists) {
        const int4 positions = reinterpret_cast<const int4*>(given)[query];
        const auto before = [&](int32_t position) {
          return KeysBefore(walk.key_map, walk.key_tokens, position);
        };
        keys.x = before(positions.x);
        keys.y = max(before(positions.y), keys.x);
        keys.z = max(before(positions.z), keys.y);
        keys.w = max(before(positions.w), keys.z);
        if (keys.y == keys.z) keys = {keys.x, keys.w, keys.w, keys.w};  // they are one
        if (first_word == 0) reinterpret_cast<int4*>(memory)[query] = keys;
      }
      // Neighbours mostly mean the same tiles.
      const TilesOfInterval first(keys.x, keys.y, walk.tile_log2),
          second(keys.z, keys.w, walk.tile_log2);
      const TilesOfInterval first_before = first.OfLane(max(lane - 1, 0)),
                            second_before = second.OfLane(max(lane - 1, 0));
      uint32_t others = __ballot_sync(
          0xFFFFFFFFu,
          exists && (lane == 0 || !(first == first_before) || !(second == second_before)));
      for (; others != 0; others &= others - 1) {
        const int other = __ffs(others) - 1;
        const TilesOfInterval a = first.OfLane(other), b = second.OfLane(other);
        bits.visible |= BitsOfTiles(a.touched_begin, a.touched_end, word) |
                        BitsOfTiles(b.touched_begin, b.touched_end, word);
        bits.full &= BitsOfTiles(a.covered_begin, a.covered_end, word) |
                     BitsOfTiles(b.covered_begin, b.covered_end, word);
      }
    }
    if (word < words) memory[at.by_row + static_cast<int64_t>(row) * words + word] = bits;
  }
}

// Writes the bits by key tile of 32 x 32 tiles from those by query tile: a word of 32 lines either
// way. A whole warp calls.
__device__ __forceinline__ void TransposeBits(const TileWalk& walk, LineBits* memory,
                                              const MaskMemory& at, int32_t row_word,
                                              int32_t column_word) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t row = row_word * 32 + lane, column = column_word * 32 + lane;
  LineBits of_row = {0, 0}, of_column = {0, 0};
  if (row < walk.query_tiles) {
    of_row =
        memory[at.by_row + static_cast<int64_t>(row) * LineWords(walk.key_tiles) + column_word];
  }
  for (int bit = 0; bit < 32; ++bit) {
    const uint32_t visible = __ballot_sync(0xFFFFFFFFu, of_row.visible >> bit & 1),
                   full = __ballot_sync(0xFFFFFFFFu, of_row.full >> bit & 1);
    if (bit == lane) of_column = {visible, full};
  }
  if (column < walk.key_tiles) {
    memory[at.by_column + static_cast<int64_t>(column) * LineWords(walk.query_tiles) + row_word] =
        of_column;
  }
}

#endif  // __CUDACC__

}  // namespace ringleader::kernels::sm90
