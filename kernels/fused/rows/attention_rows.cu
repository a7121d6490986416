// All of it is bound by memory: a thread moves 16 or 32 bytes, neighbours touch neighbouring ones.
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/fused/rows/attention_rows.h"
#include "kernels/fused/vector/e4m3.cuh"
#include "kernels/fused/vector/row_block.cuh"

namespace ringleader::kernels::fused {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements of a thread: 16 bytes of bf16

unsigned Blocks(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

__device__ __forceinline__ int64_t ThreadIndex() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ __forceinline__ uint32_t PackPair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint4 PackEight(const float4& a, const float4& b) {
  return make_uint4(PackPair(a.x, a.y), PackPair(a.z, a.w), PackPair(b.x, b.y), PackPair(b.z, b.w));
}
__device__ __forceinline__ float DotPair(uint32_t a, uint32_t b) {
  const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&a));
  const float2 y = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&b));
  return fmaf(x.x, y.x, x.y * y.y);
}

// Which part of a [tokens, heads, d] tensor a thread has.
struct Part {
  int64_t token;
  int32_t head, chunk;

  template <typename T>
  __device__ T* Of(const TokenMajor<T>& x) const {
    return x.data + token * x.token_stride + head * x.head_stride + chunk * kVector;
  }
};
template <typename T>
__device__ __forceinline__ Part PartOf(int64_t index, const TokenMajor<T>& x) {
  const int32_t chunks = x.head_dim / kVector;
  const int64_t row = index / chunks;
  return {row / x.heads, static_cast<int32_t>(row % x.heads), static_cast<int32_t>(index % chunks)};
}
template <typename T>
__host__ __device__ int64_t Parts(const TokenMajor<T>& x) {
  return x.tokens * x.heads * (x.head_dim / kVector);
}

__global__ void FinishOutputKernel(TokenMajor<const float> sums, const float* lse, uint4* out) {
  const int64_t index = ThreadIndex();
  if (index >= Parts(sums)) return;
  const Part part = PartOf(index, sums);
  uint4 rounded = make_uint4(0, 0, 0, 0);
  if (lse[part.head * sums.tokens + part.token] != -INFINITY) {
    const auto* const source = reinterpret_cast<const float4*>(part.Of(sums));
    rounded = PackEight(source[0], source[1]);
  }
  out[index] = rounded;
}

// A block has a token's heads.
template <int V>
__global__ void __launch_bounds__(kMaxRowThreads)
    FinishAndCastKernel(TokenMajor<const float> sums, const float* lse, uint4* out, E4m3Rows cast) {
  __shared__ uint32_t slots[32];
  const int32_t chunks = sums.head_dim / kVector, vectors = sums.heads * chunks;
  const int64_t token = blockIdx.x;
  Bf16x8 x[V];
  uint32_t magnitudes = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int32_t i = threadIdx.x + v * blockDim.x, head = i / chunks;
    x[v] = ZeroVec();
    if (i < vectors && lse[head * sums.tokens + token] != -INFINITY) {
      const auto* const source =
          reinterpret_cast<const float4*>(Part{token, head, i % chunks}.Of(sums));
      const uint4 rounded = PackEight(source[0], source[1]);
      x[v] = *reinterpret_cast<const Bf16x8*>(&rounded);
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) magnitudes = MaxMagnitudes(magnitudes, x[v]);
  const E4m3Scale scale = BlockScale(magnitudes, slots);
  if (threadIdx.x == 0) cast.scales[token] = scale.scale;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int32_t i = threadIdx.x + v * blockDim.x;
    if (i >= vectors) continue;
    const int64_t at = token * vectors + i;
    out[at] = *reinterpret_cast<const uint4*>(&x[v]);
    StoreCodes(cast.codes + at * kVector, x[v], scale.inverse);
  }
}

// head_dim / 8 neighbouring lanes a row: 8 or 16.
__global__ void RowDeltaKernel(TokenMajor<const __nv_bfloat16> d_out,
                               TokenMajor<const __nv_bfloat16> out, float* delta) {
  const int64_t index = ThreadIndex();
  float sum = 0.0f;
  Part part = {};
  const bool inside = index < Parts(out);
  if (inside) {
    part = PartOf(index, out);
    const uint4 a = *reinterpret_cast<const uint4*>(part.Of(d_out));
    const uint4 b = *reinterpret_cast<const uint4*>(part.Of(out));
    sum = DotPair(a.x, b.x) + DotPair(a.y, b.y) + DotPair(a.z, b.z) + DotPair(a.w, b.w);
  }
  for (int lanes = out.head_dim / kVector / 2; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  }
  if (inside && part.chunk == 0) delta[part.head * out.tokens + part.token] = sum;
}

__global__ void PackKvKernel(TokenMajor<const __nv_bfloat16> k, TokenMajor<const __nv_bfloat16> v,
                             uint4* slot) {
  const int64_t index = ThreadIndex(), parts = Parts(k);
  if (index >= 2 * parts) return;
  const TokenMajor<const __nv_bfloat16>& x = index < parts ? k : v;
  slot[index] = *reinterpret_cast<const uint4*>(PartOf(index % parts, x).Of(x));
}

// Eight neighbouring elements.
struct Eight {
  float4 a = make_float4(0, 0, 0, 0), b = make_float4(0, 0, 0, 0);
};
__device__ __forceinline__ Eight LoadEight(const float* from) {
  return {reinterpret_cast<const float4*>(from)[0], reinterpret_cast<const float4*>(from)[1]};
}
__device__ __forceinline__ Eight LoadEight(const __nv_bfloat16* from) {
  const uint4 x = *reinterpret_cast<const uint4*>(from);
  const auto pair = [](uint32_t bits) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits));
  };
  const float2 a = pair(x.x), b = pair(x.y), c = pair(x.z), d = pair(x.w);
  return {make_float4(a.x, a.y, b.x, b.y), make_float4(c.x, c.y, d.x, d.y)};
}
__device__ __forceinline__ void StoreEight(const Eight& x, float* to) {
  reinterpret_cast<float4*>(to)[0] = x.a;
  reinterpret_cast<float4*>(to)[1] = x.b;
}
__device__ __forceinline__ void StoreEight(const Eight& x, __nv_bfloat16* to) {
  *reinterpret_cast<uint4*>(to) = PackEight(x.a, x.b);
}
__device__ __forceinline__ float4 Sum(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__global__ void AddFloatsKernel(float4* to, const float4* from, int64_t count) {
  const int64_t i = ThreadIndex();
  if (i < count) to[i] = Sum(to[i], from[i]);
}

__global__ void RoundToBf16Kernel(const float4* from, uint4* to, int64_t count) {
  const int64_t i = ThreadIndex();
  if (i < count) to[i] = PackEight(from[2 * i], from[2 * i + 1]);
}

__global__ void WidenToFloatKernel(const __nv_bfloat16* from, float* to, int64_t count) {
  const int64_t i = ThreadIndex();
  if (i < count) StoreEight(LoadEight(from + i * kVector), to + i * kVector);
}

enum class RowPass { kGather, kSpread, kAdd };

// A thread takes eight elements of a slot; blockIdx.y is the part.
template <RowPass kPass, typename From, typename To>
__global__ void PackedRowsKernel(const PackedRows rows, const From* from, To* to) {
  const auto per_row = static_cast<uint32_t>(rows.row / kVector);
  const auto index = static_cast<uint32_t>(ThreadIndex());
  const uint32_t row = index / per_row;
  if (row >= rows.rows) return;
  const int32_t place = rows.places[row / kPackedUnit];
  const int64_t in_slot = (blockIdx.y * rows.rows * per_row + index) * kVector;
  const int64_t packed_row = blockIdx.y * rows.packed + place + row % kPackedUnit;
  const int64_t in_packed = (packed_row * per_row + index % per_row) * kVector;
  switch (kPass) {
    case RowPass::kGather:
      if (place >= 0) StoreEight(LoadEight(from + in_slot), to + in_packed);
      return;
    case RowPass::kSpread:
      StoreEight(place >= 0 ? LoadEight(from + in_packed) : Eight(), to + in_slot);
      return;
    case RowPass::kAdd: {
      if (place < 0) return;
      const Eight sum = LoadEight(to + in_slot), added = LoadEight(from + in_packed);
      StoreEight({Sum(sum.a, added.a), Sum(sum.b, added.b)}, to + in_slot);
      return;
    }
  }
}

template <typename T>
absl::Status CheckRows(const char* name, const TokenMajor<T>& x) {
  constexpr int64_t kAligned = 16 / sizeof(T);
  if (x.data == nullptr || reinterpret_cast<uintptr_t>(x.data) % 16 != 0 ||
      x.token_stride % kAligned != 0 || x.head_stride % kAligned != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: its memory must be aligned to 16 bytes, and its strides (%d, %d) be "
                        "multiples of %d elements; make it contiguous",
                        name, x.token_stride, x.head_stride, kAligned));
  }
  return absl::OkStatus();
}

absl::Status Launched(const char* what) {
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), what);
  return absl::OkStatus();
}

template <RowPass kPass, typename From, typename To>
absl::Status RunPackedRows(const char* what, const PackedRows& rows, const From* from, To* to,
                           cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSet(rows.places, "packed rows: places"));
  RETURN_IF_ERROR(CheckPointer(from, "packed rows: from"));
  RETURN_IF_ERROR(CheckPointer(to, "packed rows: to"));
  RETURN_IF_ERROR(CheckSize(rows.row, "packed rows: elements of a row", kVector, 1 << 20, kVector));
  RETURN_IF_ERROR(CheckSize(rows.rows, "packed rows: rows of a slot", 1,
                            (int64_t{1} << 31) / (rows.row / kVector)));
  const dim3 blocks(Blocks(rows.rows * (rows.row / kVector)), 2);
  PackedRowsKernel<kPass><<<blocks, kThreads, 0, stream>>>(rows, from, to);
  return Launched(what);
}

}  // namespace

absl::Status GatherRows(const PackedRows& rows, const __nv_bfloat16* slot, __nv_bfloat16* packed,
                        cudaStream_t stream) {
  return RunPackedRows<RowPass::kGather>("GatherRows", rows, slot, packed, stream);
}

absl::Status GatherRows(const PackedRows& rows, const float* slot, float* packed,
                        cudaStream_t stream) {
  return RunPackedRows<RowPass::kGather>("GatherRows", rows, slot, packed, stream);
}

absl::Status GatherRows(const PackedRows& rows, const float* slot, __nv_bfloat16* packed,
                        cudaStream_t stream) {
  return RunPackedRows<RowPass::kGather>("GatherRows", rows, slot, packed, stream);
}

absl::Status SpreadRows(const PackedRows& rows, const __nv_bfloat16* packed, __nv_bfloat16* slot,
                        cudaStream_t stream) {
  return RunPackedRows<RowPass::kSpread>("SpreadRows", rows, packed, slot, stream);
}

absl::Status AddRows(const PackedRows& rows, const float* packed, float* slot,
                     cudaStream_t stream) {
  return RunPackedRows<RowPass::kAdd>("AddRows", rows, packed, slot, stream);
}

absl::Status AddRows(const PackedRows& rows, const __nv_bfloat16* packed, float* slot,
                     cudaStream_t stream) {
  return RunPackedRows<RowPass::kAdd>("AddRows", rows, packed, slot, stream);
}

absl::Status FinishOutput(const TokenMajor<const float>& sums, const float* lse, __nv_bfloat16* out,
                          const E4m3Rows& cast, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckRows("sums", sums));
  if (cast.codes != nullptr && sums.tokens > 0) {
    RETURN_IF_ERROR(CheckCast(cast, "FinishOutput: cast"));
    const int64_t dim = int64_t{sums.heads} * sums.head_dim;
    RETURN_IF_ERROR(CheckSize(dim, "FinishOutput: heads * head_dim", kVector, kMaxCastDim));
    LaunchRows(dim, [&](auto vectors, int threads) {
      FinishAndCastKernel<vectors><<<static_cast<unsigned>(sums.tokens), threads, 0, stream>>>(
          sums, lse, reinterpret_cast<uint4*>(out), cast);
    });
    return Launched("FinishOutput");
  }
  FinishOutputKernel<<<Blocks(Parts(sums)), kThreads, 0, stream>>>(sums, lse,
                                                                   reinterpret_cast<uint4*>(out));
  return Launched("FinishOutput");
}

absl::Status RowDelta(const TokenMajor<const __nv_bfloat16>& d_out,
                      const TokenMajor<const __nv_bfloat16>& out, float* delta,
                      cudaStream_t stream) {
  RETURN_IF_ERROR(CheckRows("d_out", d_out));
  RETURN_IF_ERROR(CheckRows("out", out));
  RowDeltaKernel<<<Blocks(Parts(out)), kThreads, 0, stream>>>(d_out, out, delta);
  return Launched("RowDelta");
}

absl::Status PackKv(const TokenMajor<const __nv_bfloat16>& k,
                    const TokenMajor<const __nv_bfloat16>& v, __nv_bfloat16* slot,
                    cudaStream_t stream) {
  RETURN_IF_ERROR(CheckRows("k", k));
  RETURN_IF_ERROR(CheckRows("v", v));
  PackKvKernel<<<Blocks(2 * Parts(k)), kThreads, 0, stream>>>(k, v, reinterpret_cast<uint4*>(slot));
  return Launched("PackKv");
}

absl::Status AddFloats(float* to, const float* from, int64_t count, cudaStream_t stream) {
  AddFloatsKernel<<<Blocks(count / 4), kThreads, 0, stream>>>(
      reinterpret_cast<float4*>(to), reinterpret_cast<const float4*>(from), count / 4);
  return Launched("AddFloats");
}

absl::Status RoundToBf16(const float* from, __nv_bfloat16* to, int64_t count, cudaStream_t stream) {
  RoundToBf16Kernel<<<Blocks(count / 8), kThreads, 0, stream>>>(
      reinterpret_cast<const float4*>(from), reinterpret_cast<uint4*>(to), count / 8);
  return Launched("RoundToBf16");
}

absl::Status WidenToFloat(const __nv_bfloat16* from, float* to, int64_t count,
                          cudaStream_t stream) {
  WidenToFloatKernel<<<Blocks(count / kVector), kThreads, 0, stream>>>(from, to, count / kVector);
  return Launched("WidenToFloat");
}

}  // namespace ringleader::kernels::fused
