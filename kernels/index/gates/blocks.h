// Tile lists from block scores, on the device: the block top-k (MoBA) gate, the exact block mass
// with head-adaptive budgets (AdaSpa, section 4), and both directions of TileSelection's CSR. Equal
// to kernels/reference, bit for bit, for the gate and the lists.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {

// sums[tile, head, :] = the sum of the tile's tokens, added in their order in fp32.
// sums: [tiles, heads, head_dim]
absl::Status TileSums(const TokenMajor<const __nv_bfloat16>& x, int32_t tile, float* sums,
                      cudaStream_t stream);
// TileKeySumsStep says what these are. k: [n, kv_heads, head_dim], this rank's.
absl::Status TileKeySums(const TokenMajor<const __nv_bfloat16>& k, const TileKeySumsStep& step,
                         cudaStream_t stream);
// TileSums of each tile's first token alone.
absl::Status TileFirsts(const TokenMajor<const __nv_bfloat16>& x, int32_t tile, float* firsts,
                        cudaStream_t stream);

// Each tile of queries keeps its own block and the topk_blocks others that it sees whose mean key
// its summed query scores highest; ties go to the lower block in even heads, to the higher in odd
// ones. A head with another budget keeps OfHalves of them.
struct BlockGateArgs {
  // [query tiles, heads, head_dim]: TileSums of local queries, or TileFirsts
  const float* query_sums = nullptr;
  const float* key_sums = nullptr;  // [tiles of the sequence, kv_heads, head_dim], by position
  MeanKeys counted = {};            // TileKeySumsStep's
  ShardLayout query_layout;
  SeenKeys seen = {};  // as of all that follow, of the local queries
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t tile = 128;
  int32_t block_size = 512;  // tokens, a multiple of tile
  int32_t topk_blocks = 0;
  const int32_t* head_halves = nullptr;  // HalvesOf
  // MeanGateStep's: of logits, of `queries` a tile whose sum query_sums is.
  float scale = 0.0f;
  int32_t queries = 1;
  int64_t choosing = kAllChoose;  // likewise
  ChoiceMove move = {};
  float* means = nullptr;      // workspace: [kv_heads, blocks, head_dim]
  uint32_t* chosen = nullptr;  // [heads, query tiles, BlockWords(blocks)]
};
absl::Status SelectBlocksByMean(const BlockGateArgs& args, cudaStream_t stream);

// BlockMassStep says what it does. q: [n, heads, d], this rank's, d 64 or 128; k: [tokens,
// kv_heads, d], the whole sequence's. `workspace` has BlockMassWorkspaceBytes(tokens), aligned to
// 16.
size_t BlockMassWorkspaceBytes(int64_t tokens);
absl::Status BlockMass(const TokenMajor<const __nv_bfloat16>& q,
                       const TokenMajor<const __nv_bfloat16>& k, const BlockMassStep& step,
                       void* workspace, cudaStream_t stream);

// FixedBlocksStep, MassGateStep and AdaptDensityStep say what these do.
absl::Status KeepFixedBlocks(const FixedBlocksStep& step, cudaStream_t stream);
absl::Status SelectBlocksByMass(const MassGateStep& step, cudaStream_t stream);
absl::Status AdaptDensity(const AdaptDensityStep& step, cudaStream_t stream);

// The choice as lists of this rank's query tiles against the key tiles of one owner, by query tile
// and by key tile, of those that hold a key which is seen. Offsets are right even where the lists
// are longer than `capacity`: entries past it are dropped, so compare offsets' last element with
// it.
struct TileListsArgs {
  const uint32_t* chosen = nullptr;  // [heads, query tiles, BlockWords(blocks)]
  ShardLayout query_layout;
  ShardLayout key_layout;  // of the owner
  SeenKeys seen = {};
  int32_t heads = 0;
  int32_t tile = 128;
  int32_t block_size = 128;
  int64_t capacity = 0;               // elements of columns, and of rows
  int32_t* row_offsets = nullptr;     // [heads, query tiles + 1]
  int32_t* columns = nullptr;         // [capacity]
  int32_t* column_offsets = nullptr;  // [heads, key tiles + 1]
  int32_t* rows = nullptr;            // [capacity]
};
absl::Status BuildTileLists(const TileListsArgs& args, cudaStream_t stream);

}  // namespace ringleader::kernels::index
