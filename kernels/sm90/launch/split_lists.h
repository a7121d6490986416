// Cuts a call's lists of tiles into parts before its kernels start (walk/list_parts.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/sm90/walk/list_parts.cuh"

namespace ringleader::kernels::sm90 {

// Where SplitLists writes, device memory.
struct SplitMemory {
  // Where the lists of each part begin, and those of the last one end: [heads, most + 1, lines].
  int32_t* begins = nullptr;
  // Of each part, [heads, most]: how many of the head's first lines hold all of it. Zeros before;
  // null where nobody asks.
  int32_t* lines = nullptr;
  // Becomes 0 for each part that holds something of some head, [most]; null where nobody asks.
  int32_t* first_items = nullptr;
};

// Makes *walk, of whole lists, find its lists in parts.
template <WalkDirection kDirection>
absl::Status SplitLists(const ListParts& parts, int32_t heads, const SplitMemory& memory,
                        TileWalk* walk, cudaStream_t stream);

extern template absl::Status SplitLists<WalkDirection::kAlongRow>(const ListParts&, int32_t,
                                                                  const SplitMemory&, TileWalk*,
                                                                  cudaStream_t);
extern template absl::Status SplitLists<WalkDirection::kAlongColumn>(const ListParts&, int32_t,
                                                                     const SplitMemory&, TileWalk*,
                                                                     cudaStream_t);

}  // namespace ringleader::kernels::sm90
