// The sums of keys from which gates by mean keys start.
#pragma once

#include "absl/status/statusor.h"
#include "patterns/index/device_array.h"
#include "patterns/index/index_device.h"

namespace ringleader::patterns {

// Gathers the sums of the keys of each tile of the sequence, in its order: [tiles, kv_heads,
// head_dim]. The same on all ranks.
absl::StatusOr<DeviceArray<float>> GatherKeySums(const IndexInputs& inputs, int tile,
                                                 IndexDevice& device);

}  // namespace ringleader::patterns
