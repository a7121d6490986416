// How a pattern chooses key blocks for each tile of queries, cut where ranks exchange: steps over a
// call's queries and keys that the CPU engine (reference/) and GPUs (index/) both take. A pattern
// that chooses in another way adds its steps here and their arithmetic to the two engines.
//
// A choice is a bit for each block of the sequence: bit B of row [head, query tile] is
// chosen[row * BlockWords(blocks) + B / 32] >> B % 32 & 1.
#pragma once

#include <cstdint>
#include <variant>

#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels {

RINGLEADER_HOST_DEVICE inline int32_t BlockWords(int32_t blocks) {
  return (blocks + 31) / 32;
}

// The sums of the keys of each tile of this rank, added in the order of tokens in fp32.
struct TileKeySumsStep {
  int32_t tile = 128;
  float* sums = nullptr;  // [local tiles, kv_heads, head_dim]
};

// Rows of the local tiles of all ranks, in the order of the sequence.
struct OrderTilesStep {
  const float* gathered = nullptr;  // [ranks, local tiles, row]
  ShardLayout layout;
  int32_t tile = 128;
  int64_t row = 0;
  float* ordered = nullptr;  // [tiles of the sequence, row]
};

// Each tile of queries keeps its own block and the topk_blocks earlier ones whose mean key its
// summed query, or the first one alone, scores highest, in fp32; ties go to the lower block in even
// heads, to the higher one in odd heads (TiesGoLate).
struct MeanGateStep {
  const float* key_sums = nullptr;  // [tiles of the sequence, kv_heads, head_dim]
  ShardLayout query_layout;
  // [n]: TileSelection::document_starts. Blocks that end before the document of a tile's first
  // query starts are no candidates. Null: the sequence is one document.
  const int32_t* document_starts = nullptr;
  int32_t tile = 128;
  int32_t block_size = 512;  // tokens, a multiple of tile
  int32_t topk_blocks = 0;
  bool first_query_gates = false;  // by a query that no other of its tile precedes
  uint32_t* chosen = nullptr;  // [heads, query tiles, BlockWords(blocks)]
};

using BlockStep = std::variant<TileKeySumsStep, OrderTilesStep, MeanGateStep>;

}  // namespace ringleader::kernels
