// Forward and backward over lists of tiles, whatever the keys are: shards of a sequence or selected
// columns.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/reference/attention/tile_steps.h"
#include "kernels/reference/math/engine.h"
#include "kernels/reference/tiles/tile_lists.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::reference {

// What both passes read. Keys are cut into tiles of `tile` rows; those of kv head g are
// key_tokens[g] rows.
struct PassInputs {
  TokenMajor<const float> q, k, v;
  int tile = 0;
  float scale = 0.0f;
  std::vector<int64_t> key_tokens;          // [kv heads]
  std::vector<const TileList*> lists = {};  // [heads]; heads may share one
  // Mask of a query head's tile pair. `bias` is room for kMaxTile floats that the mask may use.
  std::function<PairMask(int head, int64_t query_tile, int64_t key_tile, float* bias)> mask = {};

  int group() const { return q.heads / k.heads; }
  int64_t query_tiles() const { return TileCount(q.tokens, tile); }
  int64_t key_tiles() const { return TileCount(k.tokens, tile); }
  // Rows of a tile.
  int QueryRows(int64_t a) const {
    return static_cast<int>(q.tokens - a * tile < tile ? q.tokens - a * tile : tile);
  }
  int KeyRows(int kv_head, int64_t b) const {
    const int64_t left = key_tokens[kv_head] - b * tile;
    return static_cast<int>(left < tile ? left : tile);
  }
};

// Merges into out and lse.
void ForwardPass(Engine& engine, const PassInputs& in, const TokenMajor<float>& out, float* lse);

// Adds into dq, dk and dv.
struct BackwardOutputs {
  TokenMajor<float> dq, dk, dv;
};
void BackwardPass(Engine& engine, const PassInputs& in, const TokenMajor<const float>& d_out,
                  const float* lse, const float* delta, const BackwardOutputs& out);

}  // namespace ringleader::kernels::reference
