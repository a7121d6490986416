#include "kernels/sm90/launch/tensor_map.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/sm90/launch/bytes_map.h"

namespace ringleader::kernels::sm90 {
namespace {

// Through the runtime, so that programs need not link the driver's library and start on machines
// without one.
absl::StatusOr<decltype(&cuTensorMapEncodeTiled)> EncodeFunction() {
  static void* const function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
  }();
  if (function == nullptr) {
    return absl::FailedPreconditionError(
        "the CUDA driver has no cuTensorMapEncodeTiled; Hopper kernels need driver 525 or newer");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

template <typename T>
absl::Status CheckTensor(const TokenMajor<T>& tensor, int64_t element_bytes,
                         std::string_view name) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(tensor.data);
  const int64_t token_bytes = tensor.token_stride * element_bytes;
  const int64_t head_bytes = tensor.head_stride * element_bytes;
  if (address == 0 || address % 16 != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: data must be a device pointer aligned to 16 bytes", std::string(name)));
  }
  if (token_bytes % 16 != 0 || head_bytes % 16 != 0 || token_bytes <= 0 || head_bytes <= 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: strides must be positive multiples of %d elements; token_stride is %d, head_stride %d",
        std::string(name), 16 / element_bytes, tensor.token_stride, tensor.head_stride));
  }
  return absl::OkStatus();
}

// A dimension of a map: its size in elements, bytes from one to the next (of the first: its
// element's), elements of a box.
struct Dimension {
  int64_t size;
  int64_t stride_bytes;
  int box;
};

template <typename T, size_t kDimensions>
absl::StatusOr<CUtensorMap> Encode(const TokenMajor<T>& tensor, CUtensorMapDataType type,
                                   const Dimension (&dimensions)[kDimensions],
                                   std::string_view name,
                                   CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  ASSIGN_OR_RETURN(const auto encode, EncodeFunction());
  cuuint64_t sizes[kDimensions], strides[kDimensions];
  cuuint32_t box[kDimensions], element_strides[kDimensions];
  for (size_t i = 0; i < kDimensions; ++i) {
    sizes[i] = static_cast<cuuint64_t>(dimensions[i].size);
    strides[i] = static_cast<cuuint64_t>(dimensions[i].stride_bytes);
    box[i] = static_cast<cuuint32_t>(dimensions[i].box);
    element_strides[i] = 1;
  }
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, kDimensions, const_cast<void*>(static_cast<const void*>(tensor.data)),
             sizes, strides + 1, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: the driver refused a tensor map (CUresult %d) for %d tokens, %d heads, head_dim %d, "
        "token_stride %d, head_stride %d",
        std::string(name), static_cast<int>(result), tensor.tokens, tensor.heads, tensor.head_dim,
        tensor.token_stride, tensor.head_stride));
  }
  return map;
}

// [heads, d / block, tokens, block]; a box is one 128-byte row of each of its tokens and blocks.
template <typename T>
absl::StatusOr<CUtensorMap> EncodeTokens(const TokenMajor<T>& tensor, CUtensorMapDataType type,
                                         int box_blocks, int box_tokens, std::string_view name) {
  constexpr int64_t kBytes = sizeof(T);
  constexpr int kBlock = 128 / kBytes;
  RETURN_IF_ERROR(CheckTensor(tensor, kBytes, name));
  return Encode(tensor, type,
                {{kBlock, kBytes, kBlock},
                 {tensor.tokens, tensor.token_stride * kBytes, box_tokens},
                 {tensor.head_dim / kBlock, 128, box_blocks},
                 {tensor.heads, tensor.head_stride * kBytes, 1}},
                name);
}

}  // namespace

absl::StatusOr<CUtensorMap> LoadMap(const TokenMajor<const __nv_bfloat16>& tensor, int box_tokens,
                                    std::string_view name) {
  return EncodeTokens(tensor, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, tensor.head_dim / 64, box_tokens,
                      name);
}

absl::StatusOr<CUtensorMap> LoadBlockMap(const TokenMajor<const __nv_bfloat16>& tensor,
                                         int box_tokens, std::string_view name) {
  return EncodeTokens(tensor, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 1, box_tokens, name);
}

absl::StatusOr<CUtensorMap> LoadBytesMap(const TokenMajor<const uint8_t>& tensor, int box_tokens,
                                         std::string_view name) {
  RETURN_IF_ERROR(CheckTensor(tensor, 1, name));
  return Encode(tensor, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                {{64, 1, 64},
                 {tensor.tokens, tensor.token_stride, box_tokens},
                 {1, 64, 1},
                 {tensor.heads, tensor.head_stride, 1}},
                name, CU_TENSOR_MAP_SWIZZLE_64B);
}

absl::StatusOr<CUtensorMap> LoadGroupMap(const TokenMajor<const __nv_bfloat16>& tensor,
                                         int group_tokens, int box_groups, std::string_view name) {
  constexpr int64_t kBytes = sizeof(__nv_bfloat16);
  RETURN_IF_ERROR(CheckTensor(tensor, kBytes, name));
  const int64_t token_bytes = tensor.token_stride * kBytes;
  return Encode(tensor, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                {{64, kBytes, 64},
                 {tensor.tokens / group_tokens, group_tokens * token_bytes, box_groups},
                 {group_tokens, token_bytes, 1},
                 {tensor.head_dim / 64, 128, 1},
                 {tensor.heads, tensor.head_stride * kBytes, 1}},
                name);
}

absl::StatusOr<CUtensorMap> AddMap(const TokenMajor<float>& tensor, int box_blocks, int box_tokens,
                                   std::string_view name) {
  return EncodeTokens(tensor, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, box_blocks, box_tokens, name);
}

}  // namespace ringleader::kernels::sm90
