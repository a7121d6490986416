// Where a rank's tiles lie in the sequence.
#pragma once

#include <cstdint>

#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels::index {

// How many of this rank's tokens lie before `position`.
__device__ __forceinline__ uint32_t TokensBefore(const ShardLayout& layout, uint32_t position) {
  if (layout.ranks == 1) return position;
  const auto rank = static_cast<uint32_t>(layout.rank), ranks = static_cast<uint32_t>(layout.ranks);
  const auto within = [position](uint32_t begin, uint32_t tokens) {
    return position <= begin ? 0 : min(position - begin, tokens);
  };
  switch (layout.kind) {
    case LayoutKind::kContiguous: {
      const auto held = static_cast<uint32_t>(layout.local_tokens());
      return within(rank * held, held);
    }
    case LayoutKind::kZigzag: {
      const uint32_t chunk = static_cast<uint32_t>(layout.tokens) / (2 * ranks);
      return within(rank * chunk, chunk) + within((2 * ranks - 1 - rank) * chunk, chunk);
    }
    case LayoutKind::kStriped: {
      const auto stripe = static_cast<uint32_t>(layout.stripe);
      const uint32_t round = position / (stripe * ranks);
      return round * stripe + within((round * ranks + rank) * stripe, stripe);
    }
  }
  return 0;
}

// How many of this rank's tiles of `tile` tokens begin before `position`. Positions ascend with
// local tokens, so that the tiles which begin in [a, b) are TilesBefore(a) to TilesBefore(b) - 1.
__device__ __forceinline__ int TilesBefore(const ShardLayout& layout, int32_t tile,
                                           int64_t position) {
  const int64_t inside = max(int64_t{0}, min(position, layout.tokens));
  const auto size = static_cast<uint32_t>(tile);
  return static_cast<int>((TokensBefore(layout, static_cast<uint32_t>(inside)) + size - 1) / size);
}

}  // namespace ringleader::kernels::index
