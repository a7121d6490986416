// The sums of keys from which gates by mean keys start.
#pragma once

#include "absl/status/statusor.h"
#include "patterns/index/device_array.h"
#include "patterns/index/index_device.h"
#include "ringleader/kernels/seen_keys.h"

namespace ringleader::patterns {

// The keys that means count: of the block in which a document begins, its own, and no padding.
inline kernels::MeanKeys MeanKeysOf(const IndexInputs& inputs) {
  return {.starts = inputs.documents == nullptr ? nullptr : inputs.documents->key_starts.data(),
          .content = ContentOf(inputs)};
}

// Gathers the sums of these keys of each tile of the sequence, in its order: [tiles, kv_heads,
// head_dim]. The same on all ranks.
absl::StatusOr<DeviceArray<float>> GatherKeySums(const IndexInputs& inputs, int tile,
                                                 IndexDevice& device);

}  // namespace ringleader::patterns
