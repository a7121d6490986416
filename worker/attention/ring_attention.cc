#include "worker/attention/ring_attention.h"

#include <limits>
#include <utility>

#include "base/status_macros.h"
#include "worker/attention/attention_engine.h"

namespace ringleader::attention {

namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

// Lets the autograd graph hold what is not a tensor.
struct SavedLayer : torch::CustomClassHolder {
  std::shared_ptr<AttentionEngine> engine;
  std::shared_ptr<const LayerIndex> index;
};

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& q_in, const Tensor& k_in,
                        const Tensor& v_in, int64_t layer,
                        const std::shared_ptr<AttentionEngine>& engine) {
    const Tensor q = DenseRows(q_in), k = DenseRows(k_in), v = DenseRows(v_in);
    const Tensor out = torch::zeros(q.sizes(), q.options());
    const Tensor lse =
        torch::full({q.size(1), q.size(0)}, -std::numeric_limits<float>::infinity(), q.options());
    auto index =
        engine->Forward(static_cast<int>(layer), View<const float>(q), View<const float>(k),
                        View<const float>(v), View<float>(out), lse.data_ptr<float>());
    Check(index.status());
    context->save_for_backward({q, k, v, out, lse});
    auto saved = c10::make_intrusive<SavedLayer>();
    saved->engine = engine;
    saved->index = *std::move(index);
    context->saved_data["layer"] = c10::IValue::make_capsule(std::move(saved));
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list tensors = context->get_saved_variables();
    const Tensor &q = tensors[0], &k = tensors[1], &v = tensors[2];
    const auto capsule = context->saved_data["layer"].toCapsule();
    const auto* saved = static_cast<const SavedLayer*>(capsule.get());
    const Tensor d_out = DenseRows(gradients[0]);
    const Tensor dq = torch::zeros(q.sizes(), q.options());
    const Tensor dk = torch::zeros(k.sizes(), k.options());
    const Tensor dv = torch::zeros(v.sizes(), v.options());
    Check(saved->engine->Backward(*saved->index, {.q = View<const float>(q),
                                                  .k = View<const float>(k),
                                                  .v = View<const float>(v),
                                                  .out = View<const float>(tensors[3]),
                                                  .d_out = View<const float>(d_out),
                                                  .lse = tensors[4].data_ptr<float>(),
                                                  .dq = View<float>(dq),
                                                  .dk = View<float>(dk),
                                                  .dv = View<float>(dv)}));
    return {dq, dk, dv, Tensor(), Tensor()};
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<RingAttention>> RingAttention::Create(
    const AttentionOptions& options, comm::Communicator* communicator) {
  ASSIGN_OR_RETURN(std::shared_ptr<AttentionEngine> engine,
                   AttentionEngine::Create(options, communicator));
  return std::unique_ptr<RingAttention>(new RingAttention(std::move(engine)));
}

RingAttention::RingAttention(std::shared_ptr<AttentionEngine> engine)
    : engine_(std::move(engine)) {}
RingAttention::~RingAttention() = default;

Tensor RingAttention::Forward(int layer, const Tensor& q, const Tensor& k, const Tensor& v) {
  CheckTensor("q", q);
  CheckTensor("k", k);
  CheckTensor("v", v);
  TORCH_CHECK(k.sizes() == v.sizes() && k.size(0) == q.size(0) && k.size(2) == q.size(2),
              "attention: q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(),
              " do not belong together");
  return AttentionFunction::apply(q, k, v, int64_t{layer}, engine_);
}

absl::Status RingAttention::SetBudgets(std::span<const LayerBudget> budgets) {
  return engine_->SetBudgets(budgets);
}

AttentionStats RingAttention::TakeStats() {
  return engine_->TakeStats();
}

}  // namespace ringleader::attention
