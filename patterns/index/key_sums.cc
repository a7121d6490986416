#include "patterns/index/key_sums.h"

#include "base/status_macros.h"

namespace ringleader::patterns {

absl::StatusOr<DeviceArray<float>> GatherKeySums(const IndexInputs& inputs, int tile,
                                                 IndexDevice& device) {
  const kernels::ShardLayout& layout = inputs.layout;
  const int64_t local_tiles = (layout.local_tokens() + tile - 1) / tile;
  const int64_t row = int64_t{inputs.kv_heads} * inputs.head_dim, part = local_tiles * row;
  const DeviceArray<float> gathered = AllocateArray<float>(device, layout.ranks * part);
  RETURN_IF_ERROR(
      device.Run(kernels::TileKeySumsStep{.layout = layout,
                                          .counted = MeanKeysOf(inputs),
                                          .tile = tile,
                                          .sums = gathered.data() + layout.rank * part}));
  if (layout.ranks == 1) return gathered;
  RETURN_IF_ERROR(device.Gather(gathered.data(), part * static_cast<int64_t>(sizeof(float))));
  const DeviceArray<float> ordered = AllocateArray<float>(device, layout.ranks * part);
  RETURN_IF_ERROR(device.Run(kernels::OrderTilesStep{.gathered = gathered.data(),
                                                     .layout = layout,
                                                     .tile = tile,
                                                     .row = row,
                                                     .ordered = ordered.data()}));
  return ordered;
}

}  // namespace ringleader::patterns
