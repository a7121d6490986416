// What gates by single keys start from.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "patterns/index/device_array.h"
#include "patterns/index/index_device.h"

namespace ringleader::patterns {

// Rows of `row_bytes` bytes of all tokens of the sequence, in its order: this rank's are those that
// `write` writes. The same on all ranks. A tile of rows, which no rank shares with another, is a
// multiple of 4 bytes. On several ranks they lie twice in memory until this returns.
absl::StatusOr<DeviceArray<std::byte>> GatherSequenceRows(
    const kernels::ShardLayout& layout, int tile, int64_t row_bytes,
    absl::FunctionRef<absl::Status(std::byte* own)> write, IndexDevice& device);

// The keys of the whole sequence, dense and in its order, of k's type: [tokens, kv_heads,
// head_dim]. The same on all ranks; nothing where this rank has them all.
absl::StatusOr<DeviceArray<std::byte>> GatherSequenceKeys(const IndexInputs& inputs, int tile,
                                                          IndexDevice& device);

}  // namespace ringleader::patterns
