#include "worker/attention/runner/ring_attention.h"

#include <utility>

#include "base/status_macros.h"

namespace ringleader::attention {

namespace {

using torch::Tensor;

void Check(const absl::Status& status) {
  TORCH_CHECK(status.ok(), "attention: ", std::string(status.message()));
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
    Check(engine_->runner->StartBackward(*index_, *device.Call(layer_, &tensors)));
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
    Check(engine_->runner->Backward(*index_, *device.Call(layer_, &tensors)));
    return tensors.gradients;
  }

 private:
  const std::shared_ptr<Engine> engine_;
  const int layer_;
  const std::shared_ptr<const LayerIndex> index_;
};

absl::StatusOr<std::unique_ptr<RingAttention>> RingAttention::Create(
    const patterns::AttentionOptions& options, std::unique_ptr<TensorDevice> device) {
  auto engine = std::make_shared<Engine>();
  engine->device = std::move(device);
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
  auto index = engine_->runner->Forward(*device.Call(layer, &tensors));
  Check(index.status());
  return {.out = tensors.out,
          .lse = tensors.lse,
          .record = std::make_shared<Record>(engine_, layer, *std::move(index))};
}

void RingAttention::StartForward(int layer, const Tensor& k, const Tensor& v) {
  const torch::NoGradGuard no_grad;
  TensorDevice& device = *engine_->device;
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
  return engine_->runner->TakeStats();
}

}  // namespace ringleader::attention
