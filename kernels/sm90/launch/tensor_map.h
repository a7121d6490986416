// Descriptors of tensors for the bulk copy engine.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <string_view>

#include "absl/status/statusor.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::sm90 {

// Describes `tensor` as [heads, d / 64, tokens, 64], read in boxes of `box_tokens` rows of one head
// in the 128-byte swizzle. `name` is used in errors: the base must be aligned to 16 bytes, strides
// be multiples of 8 elements.
absl::StatusOr<CUtensorMap> LoadMap(const TokenMajor<const __nv_bfloat16>& tensor, int box_tokens,
                                    std::string_view name);

// The same in boxes of one block of 64 columns.
absl::StatusOr<CUtensorMap> LoadBlockMap(const TokenMajor<const __nv_bfloat16>& tensor,
                                         int box_tokens, std::string_view name);

// Describes whole groups of `group_tokens` neighbours as [heads, d / 64, token of the group,
// groups, 64], read in boxes of 64 columns of one token of `box_groups` groups, which there must be
// one of.
absl::StatusOr<CUtensorMap> LoadGroupMap(const TokenMajor<const __nv_bfloat16>& tensor,
                                         int group_tokens, int box_groups, std::string_view name);

// Describes `tensor` as [heads, d / 32, tokens, 32], added to in boxes of `box_tokens` rows and
// `box_blocks` times 32 columns, swizzled in the same way. Base aligned to 16 bytes, strides
// multiples of 4 elements.
absl::StatusOr<CUtensorMap> AddMap(const TokenMajor<float>& tensor, int box_blocks, int box_tokens,
                                   std::string_view name);

}  // namespace ringleader::kernels::sm90
