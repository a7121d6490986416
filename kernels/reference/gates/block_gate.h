// MoBA by tile (block top-k) and by query: each tile of queries keeps the key blocks whose mean key
// its mean query scores highest, besides its own block (MoBA, arXiv 2502.13189).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/reference/math/engine.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::reference {

// TileKeySumsStep says what they are. k: [n, kv_heads, d].
void TileKeySums(Engine& engine, const TokenMajor<const float>& k, const TileKeySumsStep& step);

struct BlockTopKArgs {
  TokenMajor<const float> q;  // [n, heads, d]
  ShardLayout query_layout;
  SeenKeys seen = {};
  // [tiles of the sequence, kv_heads, d], by block of `tile` tokens: TileKeySums of all ranks.
  const float* key_sums = nullptr;
  MeanKeys counted = {};
  int kv_heads = 0;
  int tile = 128;
  int block_size = 512;                  // tokens, a multiple of tile
  int topk_blocks = 0;                   // besides a query's own
  const int32_t* head_halves = nullptr;  // MeanGateStep's
  int64_t choosing = kAllChoose;         // likewise
  bool first_query_gates = false;
  float scale = 0.0f;
  ChoiceMove move = {};
};

// selected: [heads, query tiles, blocks of block_size], non-zero where kept; ties as MeanGateStep
// says.
std::vector<char> SelectBlocks(Engine& engine, const BlockTopKArgs& args);

// MoBA's gate by query: QueryGateStep says what it is. q: [n, heads, d].
void ChooseByQuery(Engine& engine, const TokenMajor<const float>& q, int kv_heads,
                   const QueryGateStep& step);

// Takes one step; q and k: [n, heads, d] and [n, kv_heads, d], this rank's.
void RunBlockStep(Engine& engine, const TokenMajor<const float>& q,
                  const TokenMajor<const float>& k, const BlockStep& step);

// The selection as tile lists of this rank's queries against `owner`'s keys: TileSelection's CSR,
// of the tiles that hold a key which is seen.
struct TileCsr {
  std::vector<int32_t> row_offsets;  // [heads * (query tiles + 1)]
  std::vector<int32_t> columns;
};
TileCsr CsrOfBlocks(const std::vector<char>& selected, int heads, int tile, int block_size,
                    const ShardLayout& query, const ShardLayout& owner, const SeenKeys& seen);

}  // namespace ringleader::kernels::reference
