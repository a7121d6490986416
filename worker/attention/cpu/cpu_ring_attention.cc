#include "worker/attention/cpu/cpu_ring_attention.h"

#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "base/status_macros.h"
#include "kernels/ops/token_view.h"
#include "worker/attention/cpu/cpu_attention_call.h"
#include "worker/attention/heads/head_exchange.h"
#include "worker/attention/runner/ring_attention.h"
#include "worker/attention/stats/stopwatch.h"

namespace ringleader::attention {

namespace {

using torch::Tensor;

// Empty of a tensor that the call does not have.
template <typename T>
kernels::TokenMajor<T> View(const Tensor& x) {
  if (!x.defined()) return {};
  return kernels::ops::TokenView<T>(x, x.data_ptr<std::remove_const_t<T>>());
}

// What the engine adds to.
void AllocateResults(CallTensors& tensors) {
  auto& [q, k, v, out, lse, d_out, gradients, first_head, cast] = tensors;
  if (!q.defined()) return;  // k and v alone
  if (!d_out.defined()) {
    out = torch::zeros(q.sizes(), q.options());
    lse = torch::full({q.size(1), q.size(0)}, -std::numeric_limits<float>::infinity(), q.options());
    return;
  }
  gradients = {.dq = torch::zeros(q.sizes(), q.options()),
               .dk = torch::empty(k.sizes(), k.options()),
               .dv = torch::empty(v.sizes(), v.options())};
}

class CpuStartedExchange : public StartedExchange {
 public:
  CpuStartedExchange(comm::Communicator& communicator, Tensor sent, double* exposed_seconds)
      : exposed_seconds_(exposed_seconds),
        sent_(std::move(sent)),
        received_(torch::empty_like(sent_)),
        transfer_(communicator.AllToAll(comm::Channel::kKvInner, sent_.const_data_ptr(),
                                        sent_.nbytes() / communicator.size(),
                                        received_.mutable_data_ptr())) {}
  absl::StatusOr<Tensor> Await() override {
    const Stopwatch watch(exposed_seconds_);
    RETURN_IF_ERROR(transfer_->Wait());
    return received_;
  }

 private:
  double* const exposed_seconds_;
  const Tensor sent_, received_;
  const std::unique_ptr<comm::Transfer> transfer_;  // which lets go of both before they go
};

class CpuHeadExchange : public HeadExchange {
 public:
  CpuHeadExchange(comm::Communicator* communicator, double* exposed_seconds)
      : communicator_(*communicator), exposed_seconds_(exposed_seconds) {}
  int rank() const override { return communicator_.rank(); }
  int ranks() const override { return communicator_.size(); }
  absl::StatusOr<std::unique_ptr<StartedExchange>> Start(Tensor parts) override {
    return std::make_unique<CpuStartedExchange>(communicator_, std::move(parts), exposed_seconds_);
  }

 private:
  comm::Communicator& communicator_;
  double* const exposed_seconds_;
};

class CpuTensorDevice : public TensorDevice {
 public:
  CpuTensorDevice(comm::Communicator* communicator, comm::Communicator* heads, int threads)
      : device_(communicator, threads) {
    if (heads != nullptr) heads_.emplace(heads, device_.exposed_seconds());
  }

  AttentionDevice& device() override { return device_; }
  HeadExchange* heads() override { return heads_.has_value() ? &*heads_ : nullptr; }

  Tensor Take(const char* name, const Tensor& x) const override {
    TORCH_CHECK(x.dim() == 3 && x.scalar_type() == torch::kFloat32 && x.is_cpu(),
                "attention: ", name,
                " must be a [tokens, heads, head_dim] float32 tensor on the CPU, got ",
                x.toString(), " ", x.sizes());
    return x.stride(2) == 1 ? x : x.contiguous();
  }

  std::unique_ptr<AttentionCall> Call(int layer, CallTensors* tensors) override {
    AllocateResults(*tensors);
    const auto& [q, k, v, out, lse, d_out, gradients, first_head, cast] = *tensors;
    return std::make_unique<CpuCall>(
        &device_, layer,
        CpuCall::Tensors{.q = View<const float>(q),
                         .k = View<const float>(k),
                         .v = View<const float>(v),
                         .out = View<float>(out),
                         .lse = lse.defined() ? lse.data_ptr<float>() : nullptr,
                         .d_out = View<const float>(d_out),
                         .dq = View<float>(gradients.dq),
                         .dk = View<float>(gradients.dk),
                         .dv = View<float>(gradients.dv),
                         .first_head = first_head});
  }

 private:
  CpuAttentionDevice device_;
  std::optional<CpuHeadExchange> heads_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ContextAttention>> CreateCpuRingAttention(
    const patterns::AttentionOptions& options, comm::Communicator* communicator,
    comm::Communicator* heads) {
  return RingAttention::Create(
      options, std::make_unique<CpuTensorDevice>(communicator, heads, options.threads));
}

}  // namespace ringleader::attention
