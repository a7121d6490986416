#include "patterns/index/sequence_keys.h"

#include "base/status_macros.h"

namespace ringleader::patterns {

absl::StatusOr<DeviceArray<std::byte>> GatherSequenceRows(
    const kernels::ShardLayout& layout, int tile, int64_t row_bytes,
    absl::FunctionRef<absl::Status(std::byte* own)> write, IndexDevice& device) {
  const int64_t part = layout.local_tokens() * row_bytes;
  auto gathered = AllocateArray<std::byte>(device, layout.ranks * part);
  RETURN_IF_ERROR(write(gathered.data() + layout.rank * part));
  if (layout.ranks == 1) return gathered;
  const auto ordered = AllocateArray<std::byte>(device, layout.ranks * part);
  RETURN_IF_ERROR(device.Gather(gathered.data(), part));
  RETURN_IF_ERROR(device.Run(
      kernels::OrderTilesStep{.gathered = reinterpret_cast<const float*>(gathered.data()),
                              .layout = layout,
                              .tile = tile,
                              .row = tile * row_bytes / static_cast<int64_t>(sizeof(float)),
                              .ordered = reinterpret_cast<float*>(ordered.data())}));
  return ordered;
}

absl::StatusOr<DeviceArray<std::byte>> GatherSequenceKeys(const IndexInputs& inputs, int tile,
                                                          IndexDevice& device) {
  if (inputs.layout.ranks == 1) return DeviceArray<std::byte>();
  return GatherSequenceRows(
      inputs.layout, tile, int64_t{inputs.kv_heads} * inputs.head_dim * device.element_bytes(),
      [&](std::byte* own) { return device.Run(kernels::PackKeysStep{.packed = own}); }, device);
}

}  // namespace ringleader::patterns
