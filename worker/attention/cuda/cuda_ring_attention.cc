#include "worker/attention/cuda/cuda_ring_attention.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/sm90/hopper.h"
#include "patterns/pattern.h"
#include "worker/attention/cuda/cuda_attention_call.h"

namespace ringleader::attention {

namespace {

using torch::Tensor;

class CudaTensorDevice : public TensorDevice {
 public:
  CudaTensorDevice(comm::DeviceCommunicator* communicator,
                   const CudaAttentionDevice::Options& options)
      : device_(communicator, options) {}

  AttentionDevice& device() override { return device_; }

  // The kernels load 16 bytes at a time.
  Tensor Take(const char* name, const Tensor& x) const override {
    TORCH_CHECK(x.dim() == 3 && x.scalar_type() == torch::kBFloat16 && x.is_cuda(),
                "attention: ", name,
                " must be a [tokens, heads, head_dim] bfloat16 tensor on a GPU, got ", x.toString(),
                " ", x.sizes(), "; for float32 use the CPU engine");
    const bool aligned = x.stride(2) == 1 && x.stride(0) % 8 == 0 && x.stride(1) % 8 == 0 &&
                         reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
    return aligned ? x : x.contiguous();
  }

  std::unique_ptr<AttentionCall> Call(int layer, CallTensors* tensors) override {
    return std::make_unique<CudaCall>(&device_, layer, tensors);
  }

 private:
  CudaAttentionDevice device_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ContextAttention>> CreateCudaRingAttention(
    const patterns::AttentionOptions& options, comm::DeviceCommunicator* communicator) {
  RETURN_IF_ERROR(kernels::ops::LoadTorchCuda());
  RETURN_IF_ERROR(kernels::sm90::CheckHopper());
  const patterns::PatternDefinition* const pattern = patterns::FindDefinition(options.pattern);
  if (options.deterministic && pattern != nullptr && !pattern->repeats_on_gpus) {
    return absl::InvalidArgumentError(absl::StrCat(
        "training.deterministic: does not go with attention.pattern: ", std::string(pattern->name),
        " on GPUs"));
  }
  return RingAttention::Create(
      options,
      std::make_unique<CudaTensorDevice>(
          communicator, CudaAttentionDevice::Options{.bf16_gradients = options.bf16_gradients,
                                                     .deterministic = options.deterministic}));
}

}  // namespace ringleader::attention
