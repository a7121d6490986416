// Selected columns (verticals) on Hopper: gathered from their owners into dense rows that the copy
// engine can load, attended to outside the ring, their gradients given back. The same functions as
// kernels/reference/attention/columns.h, under the rules of kernels/sm90/attention.h.
//
// Columns that lie ahead of a query, or in a tile that the query's block diagonal covers already,
// are skipped; `tiles` must be kToeplitz with bit 0 set.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/sm90/attention.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::sm90 {

// Copies the columns that `owner` has from its k, v: [n, kv_heads, d] to rows of keys, values:
// [heads, max_columns, d]. Rows of other owners stay; rows beyond a head's count become zero.
absl::Status GatherColumns(const TokenMajor<const __nv_bfloat16>& k,
                           const TokenMajor<const __nv_bfloat16>& v, const ShardLayout& owner,
                           const ColumnSelection& columns, int32_t heads, __nv_bfloat16* keys,
                           __nv_bfloat16* values, cudaStream_t stream);

// Adds the gradients of the columns that `owner` has, d_keys, d_values: [heads, max_columns, d], to
// its dk, dv: [n, kv_heads, d], d at most 128. A position's terms are summed in fp32 in the order
// of heads, so with the same bits every time.
absl::Status ScatterColumns(const float* d_keys, const float* d_values, const ShardLayout& owner,
                            const ColumnSelection& columns, int32_t heads,
                            const TokenMajor<float>& dk, const TokenMajor<float>& dv,
                            cudaStream_t stream);
// The same into gradients in bf16, rounded once.
absl::Status ScatterColumns(const float* d_keys, const float* d_values, const ShardLayout& owner,
                            const ColumnSelection& columns, int32_t heads,
                            const TokenMajor<__nv_bfloat16>& dk,
                            const TokenMajor<__nv_bfloat16>& dv, cudaStream_t stream);

using ColumnForwardArgs = kernels::ColumnForwardArgs<__nv_bfloat16>;
using ColumnBackwardArgs = kernels::ColumnBackwardArgs<__nv_bfloat16>;

// Needs ColumnForwardWorkspaceBytes().
absl::Status ColumnForward(const ColumnForwardArgs& args, Workspace workspace, cudaStream_t stream);
int64_t ColumnForwardWorkspaceBytes(const ColumnForwardArgs& args);

// Needs ColumnBackwardWorkspaceBytes().
absl::Status ColumnBackward(const ColumnBackwardArgs& args, Workspace workspace,
                            cudaStream_t stream);
int64_t ColumnBackwardWorkspaceBytes(const ColumnBackwardArgs& args);

}  // namespace ringleader::kernels::sm90
