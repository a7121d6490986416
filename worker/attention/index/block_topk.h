// The block top-k index (MoBA, arXiv 2502.13189): each tile of queries keeps its own key block and
// the blocks whose mean key its summed query scores highest.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "patterns/attention_options.h"
#include "worker/attention/index/build_index.h"
#include "worker/attention/index/index_device.h"

namespace ringleader::attention {

// The numbers and the memory of one build.
struct BlockTopK {
  kernels::ShardLayout layout;  // of this rank
  int32_t heads = 0, kv_heads = 0, head_dim = 0;
  int32_t tile = 128, block_size = 512, topk_blocks = 0;
  const int32_t* document_starts = nullptr;  // TileSelection's
  int64_t local_tiles = 0;

  // TileSums writes the sums of this rank's tiles of keys.
  DeviceArray<float> gathered = {};  // [ranks, local_tiles, kv_heads, head_dim]
  // From OrderTileSums: the same by tile of the sequence. With one rank the memory of `gathered`.
  DeviceArray<float> key_sums = {};

  int64_t row() const { return int64_t{kv_heads} * head_dim; }
  float* mine() const { return gathered.data() + layout.rank * local_tiles * row(); }
};

// Sets what `index` holds of block top-k.
absl::Status BuildBlockTopK(const patterns::AttentionOptions& options, const IndexInputs& inputs,
                            IndexDevice& device, LayerIndex& index);

}  // namespace ringleader::attention
