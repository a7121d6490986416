// Keys of the whole sequence, from which gates by single keys start.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "patterns/index/device_array.h"
#include "patterns/index/index_device.h"

namespace ringleader::patterns {

// Gathers a row of `row_bytes` bytes for each token, in the sequence's order and the same on all
// ranks; `write` writes this rank's. A tile of rows, which no rank shares with another, is a
// multiple of 4 bytes. On several ranks the rows lie twice in memory until this returns.
absl::StatusOr<DeviceArray<std::byte>> GatherSequenceRows(
    const kernels::ShardLayout& layout, int tile, int64_t row_bytes,
    absl::FunctionRef<absl::Status(std::byte* own)> write, IndexDevice& device);

// Gathers the keys of the whole sequence, dense and in its order, of k's type: [tokens, kv_heads,
// head_dim]. The same on all ranks; empty where this rank has them all.
absl::StatusOr<DeviceArray<std::byte>> GatherSequenceKeys(const IndexInputs& inputs, int tile,
                                                          IndexDevice& device);

}  // namespace ringleader::patterns
