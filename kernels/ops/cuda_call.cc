#include "kernels/ops/cuda_call.h"

#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace ringleader::kernels::ops {

absl::Status LoadTorchCuda() {
  static const absl::Status status = [] {
    // Its registrations run as it loads; it must stay for the life of the process.
    if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) != nullptr) return absl::OkStatus();
    return absl::UnavailableError(
        absl::StrCat("LibTorch's CUDA part does not load: ", dlerror(),
                     "; install the CUDA libraries that torch names, or set LD_LIBRARY_PATH"));
  }();
  return status;
}

cudaStream_t Stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

void CheckCuda(const torch::Tensor& x, torch::ScalarType type, const char* name) {
  TORCH_CHECK(x.defined() && x.is_cuda() && x.scalar_type() == type, name,
              " must be a CUDA tensor of ", type,
              x.defined() ? c10::str("; it is ", x.toString()) : std::string("; it is undefined"));
  TORCH_CHECK(x.dim() > 0 && x.stride(-1) == 1, name,
              ": the last dimension must be dense; strides are ", x.strides());
}

void CheckRows(const torch::Tensor& x, const char* name) {
  CheckCuda(x, torch::kBFloat16, name);
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), name, " must be a dense matrix, it is ", x.sizes(),
              " with strides ", x.strides());
}

const __nv_bfloat16* Bf16(const torch::Tensor& x) {
  return reinterpret_cast<const __nv_bfloat16*>(x.const_data_ptr<at::BFloat16>());
}
__nv_bfloat16* MutableBf16(const torch::Tensor& x) {
  return reinterpret_cast<__nv_bfloat16*>(x.mutable_data_ptr<at::BFloat16>());
}

TokenMajor<const __nv_bfloat16> View(const torch::Tensor& x) {
  CheckCuda(x, torch::kBFloat16, "tensor");
  return TokenView(x, Bf16(x));
}
TokenMajor<__nv_bfloat16> MutableView(const torch::Tensor& x) {
  CheckCuda(x, torch::kBFloat16, "tensor");
  return TokenView(x, MutableBf16(x));
}
TokenMajor<float> FloatView(const torch::Tensor& x) {
  CheckCuda(x, torch::kFloat, "tensor");
  return TokenView(x, x.mutable_data_ptr<float>());
}

torch::Tensor Scratch(int64_t bytes, const torch::Tensor& like) {
  return torch::empty({std::max<int64_t>(bytes, 1)}, like.options().dtype(torch::kByte));
}

}  // namespace ringleader::kernels::ops
