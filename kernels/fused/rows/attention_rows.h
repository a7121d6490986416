// Passes over rows of tensors around the attention kernels, on the device: what a ring call does
// once or once a hop. Under the rules of kernels/sm90/attention.h: a call enqueues on `stream` and
// returns. Rows are 16-byte aligned, head_dim a multiple of 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/fused/cast.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::fused {

// Rounds the sums of all hops to the dense out: [n, heads, d]. Rows that attended to nothing (lse
// of -infinity; lse: [heads, n]) become zero. `cast`, unless null, receives a token's values with a
// scale for all its heads, at most kMaxCastDim values.
absl::Status FinishOutput(const TokenMajor<const float>& sums, const float* lse, __nv_bfloat16* out,
                          const E4m3Rows& cast, cudaStream_t stream);

// delta[head, i] = sum over the row of d_out * out. delta: [heads, n]
absl::Status RowDelta(const TokenMajor<const __nv_bfloat16>& d_out,
                      const TokenMajor<const __nv_bfloat16>& out, float* delta,
                      cudaStream_t stream);

// Keys, then values, each dense: what a hop sends. slot: [2, n, kv_heads, d]
absl::Status PackKv(const TokenMajor<const __nv_bfloat16>& k,
                    const TokenMajor<const __nv_bfloat16>& v, __nv_bfloat16* slot,
                    cudaStream_t stream);

// to[i] += from[i]; count a multiple of 4.
absl::Status AddFloats(float* to, const float* from, int64_t count, cudaStream_t stream);
// to[i] = from[i], rounded; count a multiple of 8.
absl::Status RoundToBf16(const float* from, __nv_bfloat16* to, int64_t count, cudaStream_t stream);
absl::Status WidenToFloat(const __nv_bfloat16* from, float* to, int64_t count, cudaStream_t stream);

// Some rows of a slot, [2, rows, row]: keys and values, or their gradients. Packed they are
// [2, packed, row]: those of the first part, then those of the second.
struct PackedRows {
  // [units of kPackedUnit rows]: the unit's first row among the packed ones; -1: it is none.
  const int32_t* places = nullptr;
  int64_t rows = 0, packed = 0;
  int64_t row = 0;  // elements, a multiple of 8

  int64_t elements() const { return 2 * packed * row; }  // packed
};
inline constexpr int64_t kPackedUnit = 64;

absl::Status GatherRows(const PackedRows& rows, const __nv_bfloat16* slot, __nv_bfloat16* packed,
                        cudaStream_t stream);
absl::Status GatherRows(const PackedRows& rows, const float* slot, float* packed,
                        cudaStream_t stream);
// Rounds them.
absl::Status GatherRows(const PackedRows& rows, const float* slot, __nv_bfloat16* packed,
                        cudaStream_t stream);
// Spreads them over the slot, whose other rows become zero.
absl::Status SpreadRows(const PackedRows& rows, const __nv_bfloat16* packed, __nv_bfloat16* slot,
                        cudaStream_t stream);
// Adds them to those of the slot.
absl::Status AddRows(const PackedRows& rows, const float* packed, float* slot, cudaStream_t stream);
absl::Status AddRows(const PackedRows& rows, const __nv_bfloat16* packed, float* slot,
                     cudaStream_t stream);

}  // namespace ringleader::kernels::fused
