#include "kernels/sm90/launch/tensor_map.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

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

struct Element {
  CUtensorMapDataType type;
  int64_t bytes;
  int block;  // columns of a box: one 128-byte row
};

template <typename T>
absl::StatusOr<CUtensorMap> Encode(const TokenMajor<T>& tensor, Element element,
                                   int box_columns_blocks, int box_tokens, std::string_view name) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(tensor.data);
  const int64_t token_bytes = tensor.token_stride * element.bytes;
  const int64_t head_bytes = tensor.head_stride * element.bytes;
  if (address == 0 || address % 16 != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: data must be a device pointer aligned to 16 bytes", std::string(name)));
  }
  if (token_bytes % 16 != 0 || head_bytes % 16 != 0 || token_bytes <= 0 || head_bytes <= 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: strides must be positive multiples of %d elements; token_stride is %d, head_stride %d",
        std::string(name), 16 / element.bytes, tensor.token_stride, tensor.head_stride));
  }
  ASSIGN_OR_RETURN(const auto encode, EncodeFunction());
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(element.block),
                               static_cast<cuuint64_t>(tensor.tokens),
                               static_cast<cuuint64_t>(tensor.head_dim / element.block),
                               static_cast<cuuint64_t>(tensor.heads)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(token_bytes), 128,
                                 static_cast<cuuint64_t>(head_bytes)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(element.block),
                             static_cast<cuuint32_t>(box_tokens),
                             static_cast<cuuint32_t>(box_columns_blocks), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(
      &map, element.type, 4, const_cast<void*>(static_cast<const void*>(tensor.data)), sizes,
      strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
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

}  // namespace

absl::StatusOr<CUtensorMap> LoadMap(const TokenMajor<const __nv_bfloat16>& tensor, int box_tokens,
                                    std::string_view name) {
  return Encode(tensor, {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, 64}, tensor.head_dim / 64, box_tokens,
                name);
}

absl::StatusOr<CUtensorMap> LoadBlockMap(const TokenMajor<const __nv_bfloat16>& tensor,
                                         int box_tokens, std::string_view name) {
  return Encode(tensor, {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, 64}, 1, box_tokens, name);
}

absl::StatusOr<CUtensorMap> AddMap(const TokenMajor<float>& tensor, int box_tokens,
                                   std::string_view name) {
  return Encode(tensor, {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, 32}, 1, box_tokens, name);
}

}  // namespace ringleader::kernels::sm90
