#include "worker/attention/index/block_topk.h"

#include <algorithm>

#include "base/status_macros.h"

namespace ringleader::attention {

absl::Status BuildBlockTopK(const patterns::AttentionOptions& options, const IndexInputs& inputs,
                            IndexDevice& device, LayerIndex& index) {
  const kernels::ShardLayout& layout = inputs.layout;
  BlockTopK work{.layout = layout,
                 .heads = inputs.heads,
                 .kv_heads = inputs.kv_heads,
                 .head_dim = inputs.head_dim,
                 .tile = options.tile,
                 .block_size = options.block_size,
                 .topk_blocks = options.topk_blocks,
                 .document_starts = index.document_starts(),
                 .local_tiles = (layout.local_tokens() + options.tile - 1) / options.tile};
  const int64_t part = work.local_tiles * work.row();
  work.gathered = AllocateArray<float>(device, layout.ranks * part);
  RETURN_IF_ERROR(device.TileSums(work));
  work.key_sums = work.gathered;
  if (layout.ranks > 1) {
    RETURN_IF_ERROR(
        device.Gather(work.gathered.data(), part * static_cast<int64_t>(sizeof(float))));
    work.key_sums = AllocateArray<float>(device, layout.ranks * part);
    RETURN_IF_ERROR(device.OrderTileSums(work));
  }
  const int64_t blocks = (layout.tokens + options.block_size - 1) / options.block_size;
  index.block_size = options.block_size;
  index.kept_blocks = static_cast<int32_t>(std::min<int64_t>(options.topk_blocks + 1, blocks));
  index.chosen =
      AllocateArray<uint32_t>(device, work.heads * work.local_tiles * ((blocks + 31) / 32));
  return device.Gate(work, index);
}

}  // namespace ringleader::attention
