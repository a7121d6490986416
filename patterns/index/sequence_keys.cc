#include "patterns/index/sequence_keys.h"

#include "base/status_macros.h"

namespace ringleader::patterns {

absl::StatusOr<DeviceArray<std::byte>> GatherSequenceKeys(const IndexInputs& inputs, int tile,
                                                          IndexDevice& device) {
  const kernels::ShardLayout& layout = inputs.layout;
  if (layout.ranks == 1) return DeviceArray<std::byte>();
  const int64_t row = int64_t{inputs.kv_heads} * inputs.head_dim * device.element_bytes();
  const int64_t part = layout.local_tokens() * row;
  const auto gathered = AllocateArray<std::byte>(device, layout.ranks * part);
  const auto ordered = AllocateArray<std::byte>(device, layout.ranks * part);
  RETURN_IF_ERROR(
      device.Run(kernels::PackKeysStep{.packed = gathered.data() + layout.rank * part}));
  RETURN_IF_ERROR(device.Gather(gathered.data(), part));
  RETURN_IF_ERROR(device.Run(
      kernels::OrderTilesStep{.gathered = reinterpret_cast<const float*>(gathered.data()),
                              .layout = layout,
                              .tile = tile,
                              .row = tile * row / static_cast<int64_t>(sizeof(float)),
                              .ordered = reinterpret_cast<float*>(ordered.data())}));
  return ordered;
}

}  // namespace ringleader::patterns
