#include "worker/attention/runner/ring_attention.h"

#include <limits>
#include <utility>

#include "base/status_macros.h"
#include "worker/attention/runner/attention_engine.h"

namespace ringleader::attention {

namespace {

using torch::Tensor;

void Check(const absl::Status& status) {
  TORCH_CHECK(status.ok(), "attention: ", std::string(status.message()));
}

void CheckTensor(const char* name, const Tensor& x) {
  TORCH_CHECK(x.dim() == 3 && x.scalar_type() == torch::kFloat32 && x.is_cpu(), "attention: ", name,
              " must be a [tokens, heads, head_dim] float32 tensor on the CPU, got ", x.toString(),
              " ", x.sizes());
}

template <typename T>
kernels::TokenMajor<T> View(const Tensor& x) {
  return {.data = x.data_ptr<std::remove_const_t<T>>(),
          .tokens = x.size(0),
          .heads = static_cast<int32_t>(x.size(1)),
          .head_dim = static_cast<int32_t>(x.size(2)),
          .token_stride = x.stride(0),
          .head_stride = x.stride(1)};
}

Tensor DenseRows(const Tensor& x) {
  return x.stride(2) == 1 ? x : x.contiguous();
}

class Record : public AttentionRecord {
 public:
  Record(std::shared_ptr<AttentionEngine> engine, std::shared_ptr<const LayerIndex> index)
      : engine_(std::move(engine)), index_(std::move(index)) {}

  void StartBackward(const Tensor& k, const Tensor& v) const override {
    Check(engine_->StartBackward(View<const float>(DenseRows(k)), View<const float>(DenseRows(v))));
  }

  AttentionGradients Backward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                              const Tensor& out, const Tensor& lse,
                              const Tensor& d_out_in) const override {
    const Tensor q = DenseRows(q_in), k = DenseRows(k_in), v = DenseRows(v_in);
    const Tensor d_out = DenseRows(d_out_in);
    AttentionGradients gradients{.dq = torch::zeros(q.sizes(), q.options()),
                                 .dk = torch::zeros(k.sizes(), k.options()),
                                 .dv = torch::zeros(v.sizes(), v.options())};
    Check(engine_->Backward(*index_, {.q = View<const float>(q),
                                      .k = View<const float>(k),
                                      .v = View<const float>(v),
                                      .out = View<const float>(out),
                                      .d_out = View<const float>(d_out),
                                      .lse = lse.data_ptr<float>(),
                                      .dq = View<float>(gradients.dq),
                                      .dk = View<float>(gradients.dk),
                                      .dv = View<float>(gradients.dv)}));
    return gradients;
  }

 private:
  const std::shared_ptr<AttentionEngine> engine_;
  const std::shared_ptr<const LayerIndex> index_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RingAttention>> RingAttention::Create(
    const patterns::AttentionOptions& options, comm::Communicator* communicator) {
  ASSIGN_OR_RETURN(std::shared_ptr<AttentionEngine> engine,
                   AttentionEngine::Create(options, communicator));
  return std::unique_ptr<RingAttention>(new RingAttention(std::move(engine)));
}

RingAttention::RingAttention(std::shared_ptr<AttentionEngine> engine)
    : engine_(std::move(engine)) {}
RingAttention::~RingAttention() = default;

AttentionOutput RingAttention::ForwardRaw(int layer, const Tensor& q_in, const Tensor& k_in,
                                          const Tensor& v_in) {
  CheckTensor("q", q_in);
  CheckTensor("k", k_in);
  CheckTensor("v", v_in);
  TORCH_CHECK(
      k_in.sizes() == v_in.sizes() && k_in.size(0) == q_in.size(0) && k_in.size(2) == q_in.size(2),
      "attention: q ", q_in.sizes(), ", k ", k_in.sizes(), " and v ", v_in.sizes(),
      " do not belong together");
  const Tensor q = DenseRows(q_in), k = DenseRows(k_in), v = DenseRows(v_in);
  AttentionOutput output{.out = torch::zeros(q.sizes(), q.options()),
                         .lse = torch::full({q.size(1), q.size(0)},
                                            -std::numeric_limits<float>::infinity(), q.options()),
                         .record = nullptr};
  auto index =
      engine_->Forward(layer, View<const float>(q), View<const float>(k), View<const float>(v),
                       View<float>(output.out), output.lse.data_ptr<float>());
  Check(index.status());
  output.record = std::make_shared<Record>(engine_, *std::move(index));
  return output;
}

absl::Status RingAttention::SetBudgets(std::span<const patterns::LayerBudget> budgets) {
  return engine_->SetBudgets(budgets);
}

absl::Status RingAttention::SetDocuments(int64_t tokens, std::span<const int64_t> firsts) {
  return engine_->SetDocuments(tokens, firsts);
}

AttentionStats RingAttention::TakeStats() {
  return engine_->TakeStats();
}

}  // namespace ringleader::attention
