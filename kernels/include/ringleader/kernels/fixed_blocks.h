// Blocks of keys that tiles of queries keep by their positions alone.
#pragma once

#include <cstdint>

#include "ringleader/kernels/seen_keys.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels {

// What a tile of queries keeps whatever is in it, of the blocks that it sees: its own and `local`
// to either side of it, the first `sinks`, and of every `stride` blocks of the sequence the last.
// So are the fixed patterns of Sparse Transformers (arXiv 1904.10509, section 4.3) in blocks,
// beside the attention sinks of StreamingLLM (arXiv 2309.17453).
struct FixedBlocks {
  int32_t local = 0, sinks = 0;
  int32_t stride = 0;  // 0: none but the others

  RINGLEADER_HOST_DEVICE bool IsLandmark(int64_t block) const {
    return stride > 0 && block % stride == stride - 1;
  }
  // `block` is one of `seen`.
  RINGLEADER_HOST_DEVICE bool Keeps(const SeenBlocks& seen, int32_t block) const {
    return (block >= seen.own - local && block <= seen.own + local) || block - seen.first < sinks ||
           IsLandmark(block);
  }
};

// Blocks of `tile` tokens, alike in all heads.
struct FixedBlocksStep {
  FixedBlocks kept = {};
  ShardLayout query_layout = {};
  SeenKeys seen = {};
  int32_t heads = 0;
  int32_t tile = 128;
  uint32_t* chosen = nullptr;  // [heads, query tiles, BlockWords(blocks)]

  // Word `word` of the row of local tile `a`.
  RINGLEADER_HOST_DEVICE uint32_t Word(int64_t a, int32_t word) const {
    const SeenBlocks blocks = SeenBlocksOf(seen, query_layout, a, tile, tile);
    uint32_t bits = 0;
    for (int32_t bit = 0; bit < 32; ++bit) {
      const int32_t block = word * 32 + bit;
      if (block < blocks.first || block > blocks.last) continue;
      if (kept.Keeps(blocks, block)) bits |= uint32_t{1} << bit;
    }
    return bits;
  }
};

}  // namespace ringleader::kernels
