#include "worker/attention/cuda/cuda_ring_attention.h"

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/sm90/hopper.h"
#include "patterns/pattern.h"
#include "worker/attention/cuda/cuda_attention_call.h"
#include "worker/attention/heads/head_exchange.h"

namespace ringleader::attention {

namespace {

using torch::Tensor;

// LibTorch may give away the memory of both tensors as soon as its current stream has come to the
// end of the transfer, for which the stream waits in Await.
class CudaStartedExchange : public StartedExchange {
 public:
  CudaStartedExchange(Tensor sent, Tensor received, comm::DeviceTransfer transfer,
                      DeviceTimers* timers)
      : sent_(std::move(sent)),
        received_(std::move(received)),
        transfer_(std::move(transfer)),
        timers_(*timers) {}
  ~CudaStartedExchange() override {
    if (transfer_ != nullptr) transfer_->Order(kernels::ops::Stream()).IgnoreError();
  }
  absl::StatusOr<Tensor> Await() override {
    RETURN_IF_ERROR(
        AwaitTransfer(std::exchange(transfer_, nullptr), timers_, kernels::ops::Stream()));
    return received_;
  }

 private:
  const Tensor sent_, received_;
  comm::DeviceTransfer transfer_;
  DeviceTimers& timers_;
};

class CudaHeadExchange : public HeadExchange {
 public:
  CudaHeadExchange(comm::DeviceCommunicator* communicator, DeviceTimers* timers)
      : communicator_(*communicator), timers_(*timers) {}
  int rank() const override { return communicator_.rank(); }
  int ranks() const override { return communicator_.size(); }
  absl::StatusOr<std::unique_ptr<StartedExchange>> Start(Tensor parts) override {
    Tensor received = torch::empty_like(parts);
    ASSIGN_OR_RETURN(comm::DeviceTransfer transfer,
                     communicator_.AllToAll(comm::Channel::kKvInner, parts.const_data_ptr(),
                                            parts.nbytes() / ranks(), received.mutable_data_ptr(),
                                            kernels::ops::Stream()));
    return std::make_unique<CudaStartedExchange>(std::move(parts), std::move(received),
                                                 std::move(transfer), &timers_);
  }

 private:
  comm::DeviceCommunicator& communicator_;
  DeviceTimers& timers_;
};

class CudaTensorDevice : public TensorDevice {
 public:
  CudaTensorDevice(comm::DeviceCommunicator* communicator, comm::DeviceCommunicator* heads,
                   const CudaAttentionDevice::Options& options)
      : device_(communicator, options) {
    if (heads != nullptr) heads_.emplace(heads, &device_.stats().timers());
  }

  AttentionDevice& device() override { return device_; }
  HeadExchange* heads() override { return heads_.has_value() ? &*heads_ : nullptr; }

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
  std::optional<CudaHeadExchange> heads_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ContextAttention>> CreateCudaRingAttention(
    const patterns::AttentionOptions& options, comm::DeviceCommunicator* communicator,
    comm::DeviceCommunicator* heads) {
  RETURN_IF_ERROR(kernels::ops::LoadTorchCuda());
  RETURN_IF_ERROR(kernels::sm90::CheckHopper());
  const patterns::PatternDefinition* const pattern = patterns::FindDefinition(options.pattern);
  if (options.deterministic && pattern != nullptr && !pattern->repeats_on_gpus) {
    return absl::InvalidArgumentError(absl::StrCat(
        "training.deterministic: does not go with attention.pattern: ", std::string(pattern->name),
        " on GPUs"));
  }
  return RingAttention::Create(
      options, std::make_unique<CudaTensorDevice>(
                   communicator, heads,
                   CudaAttentionDevice::Options{.bf16_gradients = options.bf16_gradients,
                                                .deterministic = options.deterministic,
                                                .overlaps_calls = options.head_groups > 1}));
}

}  // namespace ringleader::attention
