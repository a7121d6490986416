#include "worker/attention/runner/ring_attention.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/check_options.h"

namespace ringleader::attention {

namespace {

using torch::Tensor;

void Check(const absl::Status& status) {
  TORCH_CHECK(status.ok(), "attention: ", std::string(status.message()));
}

// An exchange of heads, in the time of `phase`.
template <typename Exchange>
void CheckExchange(TensorDevice& device, double AttentionSeconds::*phase, Exchange exchange) {
  Check(device.device().Begin(phase));
  Check(exchange());
  Check(device.device().End());
}

}  // namespace

class RingAttention::Record : public AttentionRecord {
 public:
  Record(std::shared_ptr<Engine> engine, int layer, std::shared_ptr<const LayerIndex> index)
      : engine_(std::move(engine)), layer_(layer), index_(std::move(index)) {}

  void StartBackward(const Tensor& k, const Tensor& v) const override {
    const torch::NoGradGuard no_grad;
    TensorDevice& device = *engine_->device;
    CallTensors tensors{.k = device.Take("k", k), .v = device.Take("v", v)};
    if (!engine_->heads.has_value()) {
      return Check(engine_->runner->StartBackward(*index_, *device.Call(layer_, &tensors)));
    }
    TORCH_CHECK(started_.empty(), "attention: a backward has been started and not been called");
    CheckExchange(device, &AttentionSeconds::backward, [&]() -> absl::Status {
      ASSIGN_OR_RETURN(started_, engine_->heads->Start({tensors.k, tensors.v}));
      return absl::OkStatus();
    });
  }

  AttentionGradients Backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                              const Tensor& lse, const Tensor& d_out) const override {
    const torch::NoGradGuard no_grad;
    TensorDevice& device = *engine_->device;
    CallTensors tensors{.q = device.Take("q", q),
                        .k = device.Take("k", k),
                        .v = device.Take("v", v),
                        .out = device.Take("out", out),
                        .lse = lse,
                        .d_out = device.Take("the gradient of out", d_out)};
    std::optional<SharedHeads>& heads = engine_->heads;
    if (heads.has_value()) {
      if (started_.empty()) StartBackward(tensors.k, tensors.v);
      CheckExchange(device, &AttentionSeconds::backward, [&]() -> absl::Status {
        RETURN_IF_ERROR(heads->ToHeads({&tensors.q, &tensors.out, &tensors.d_out}));
        return SharedHeads::Await(std::exchange(started_, {}), {&tensors.k, &tensors.v});
      });
    }
    Check(engine_->runner->Backward(*index_, *device.Call(layer_, &tensors)));
    if (heads.has_value()) {
      auto& [dq, dk, dv] = tensors.gradients;
      CheckExchange(device, &AttentionSeconds::backward, [&] {
        return heads->ToTokens({{&dq, q.size(1)}, {&dk, k.size(1)}, {&dv, v.size(1)}});
      });
    }
    return tensors.gradients;
  }

 private:
  const std::shared_ptr<Engine> engine_;
  const int layer_;
  const std::shared_ptr<const LayerIndex> index_;
  // Keys and values on their way to the ranks that attend with their heads.
  mutable SharedHeads::Started started_;
};

absl::StatusOr<std::unique_ptr<RingAttention>> RingAttention::Create(
    const patterns::AttentionOptions& options, std::unique_ptr<TensorDevice> device) {
  auto engine = std::make_shared<Engine>();
  engine->options = options;
  engine->device = std::move(device);
  HeadExchange* const heads = engine->device->heads();
  if (heads != nullptr) engine->heads.emplace(heads);
  if (const int ranks = heads == nullptr ? 1 : heads->ranks(); ranks != options.head_ranks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("parallelism.heads: %d, over %d ranks", options.head_ranks, ranks));
  }
  ASSIGN_OR_RETURN(engine->runner, RingRunner::Create(options, &engine->device->device()));
  return std::unique_ptr<RingAttention>(new RingAttention(std::move(engine)));
}

AttentionOutput RingAttention::Forward(int layer, const Tensor& q, const Tensor& k,
                                       const Tensor& v) {
  const torch::NoGradGuard no_grad;
  TensorDevice& device = *engine_->device;
  CallTensors tensors{.q = device.Take("q", q), .k = device.Take("k", k), .v = device.Take("v", v)};
  TORCH_CHECK(k.sizes() == v.sizes() && k.size(0) == q.size(0) && k.size(2) == q.size(2),
              "attention: q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(),
              " do not belong together");
  std::optional<SharedHeads>& heads = engine_->heads;
  if (heads.has_value()) {
    Check(patterns::CheckHeads(engine_->options, q.size(1), k.size(1)));
    CheckExchange(device, &AttentionSeconds::forward, [&] {
      return heads->ToHeads({&tensors.q, &tensors.k, &tensors.v});
    });
  }
  auto index = engine_->runner->Forward(*device.Call(layer, &tensors));
  Check(index.status());
  if (heads.has_value()) {
    CheckExchange(device, &AttentionSeconds::forward, [&] {
      return heads->ToTokens({{&tensors.out, q.size(1)}});
    });
  }
  return {.out = tensors.out,
          .lse = tensors.lse,
          .record = std::make_shared<Record>(engine_, layer, *std::move(index))};
}

void RingAttention::StartForward(int layer, const Tensor& k, const Tensor& v) {
  const torch::NoGradGuard no_grad;
  TensorDevice& device = *engine_->device;
  TORCH_CHECK(!engine_->heads.has_value(),
              "attention: forward cannot be started ahead where heads are shared out");
  CallTensors tensors{.k = device.Take("k", k), .v = device.Take("v", v)};
  Check(engine_->runner->StartForward(*device.Call(layer, &tensors)));
}

void RingAttention::SetDense(bool dense) {
  engine_->runner->SetDense(dense);
}

absl::Status RingAttention::SetDocuments(int64_t tokens, std::span<const int64_t> firsts,
                                         int64_t padding, std::span<const int64_t> prefix_ends) {
  return engine_->runner->SetDocuments(tokens, firsts, padding, prefix_ends);
}

absl::Status RingAttention::SetLayout(const ring::DocumentLayout& layout) {
  return engine_->runner->SetSpread(layout);
}

void RingAttention::SetStep(uint64_t step) {
  engine_->runner->SetStep(step);
}

void RingAttention::SetMove(float factor) {
  engine_->runner->SetMove(factor);
}

void RingAttention::MarkMicroBatch() {
  engine_->runner->MarkMicroBatch();
}

AttentionStats RingAttention::TakeStats() {
  AttentionStats stats = engine_->runner->TakeStats();
  if (!engine_->heads.has_value()) return stats;
  stats.head_bytes = engine_->heads->TakeBytes();
  for (LayerStats& layer : stats.layers) {
    layer.first_head = engine_->heads->rank() * static_cast<int>(layer.probed_recall.size());
  }
  return stats;
}

}  // namespace ringleader::attention
