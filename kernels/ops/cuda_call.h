// The border between LibTorch and the raw kernels: tensors become pointers and shapes here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#include <torch/types.h>

#include "absl/status/status.h"
#include "kernels/ops/check_status.h"
#include "kernels/ops/token_view.h"
#include "kernels/sm90/attention.h"

namespace ringleader::kernels::ops {

// Loads LibTorch's CUDA part, which nothing here links, so that programs start on machines without
// CUDA's libraries. UNAVAILABLE says what is missing. Idempotent; call before using CUDA tensors.
absl::Status LoadTorchCuda();

// The stream that LibTorch uses for the current device in this thread.
cudaStream_t Stream();

// Throws unless `x` is a CUDA tensor of `type` whose last dimension is dense.
void CheckCuda(const torch::Tensor& x, torch::ScalarType type, const char* name);
// Throws unless `x` is a dense bf16 matrix on a GPU.
void CheckRows(const torch::Tensor& x, const char* name);

// The memory of a bf16 tensor, to read or to write.
const __nv_bfloat16* Bf16(const torch::Tensor& x);
__nv_bfloat16* MutableBf16(const torch::Tensor& x);

// A tensor [tokens, heads, head_dim] as the kernels take it.
TokenMajor<const __nv_bfloat16> View(const torch::Tensor& x);
TokenMajor<__nv_bfloat16> MutableView(const torch::Tensor& x);
TokenMajor<float> FloatView(const torch::Tensor& x);

// Scratch memory from LibTorch's allocator, safe to drop once the work is enqueued.
torch::Tensor Scratch(int64_t bytes, const torch::Tensor& like);

// run(args, workspace of bytes(args) on `like`'s device, Stream()), as attention's kernels are
// called.
template <typename Args, typename Bytes, typename Run>
absl::Status CallWithWorkspace(const Args& args, const torch::Tensor& like, Bytes bytes, Run run) {
  const int64_t needed = bytes(args);
  const torch::Tensor scratch = Scratch(needed, like);
  return run(args, sm90::Workspace{scratch.mutable_data_ptr(), needed}, Stream());
}

}  // namespace ringleader::kernels::ops
