// Descriptors of narrow rows for the bulk copy engine, beside those of tensor_map.h.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::sm90 {

// Describes rows of bytes, 64 of each token and head, as [heads, 1, tokens, 64], read in boxes of
// `box_tokens` rows of one head in the 64-byte swizzle. Base aligned to 16 bytes, strides multiples
// of 16.
absl::StatusOr<CUtensorMap> LoadBytesMap(const TokenMajor<const uint8_t>& tensor, int box_tokens,
                                         std::string_view name);

}  // namespace ringleader::kernels::sm90
