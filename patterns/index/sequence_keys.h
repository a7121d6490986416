// What gates by single keys start from.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "patterns/index/device_array.h"
#include "patterns/index/index_device.h"

namespace ringleader::patterns {

// The keys of the whole sequence, dense and in its order, of k's type: [tokens, kv_heads,
// head_dim]. The same on all ranks; nothing where this rank has them all. They lie twice in memory
// until this returns.
absl::StatusOr<DeviceArray<std::byte>> GatherSequenceKeys(const IndexInputs& inputs, int tile,
                                                          IndexDevice& device);

}  // namespace ringleader::patterns
