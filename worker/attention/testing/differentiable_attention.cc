#include "worker/attention/testing/differentiable_attention.h"

#include <torch/autograd.h>

#include <utility>

namespace ringleader::attention::testing {

namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Lets the autograd graph hold what is not a tensor.
struct SavedRecord : torch::CustomClassHolder {
  std::shared_ptr<const AttentionRecord> record;
};

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v,
                        int64_t layer, ContextAttention* attention) {
    AttentionOutput output = attention->Forward(static_cast<int>(layer), q, k, v);
    context->save_for_backward({q, k, v, output.out, output.lse});
    auto saved = c10::make_intrusive<SavedRecord>();
    saved->record = std::move(output.record);
    context->saved_data["record"] = c10::IValue::make_capsule(std::move(saved));
    return output.out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list tensors = context->get_saved_variables();
    const auto capsule = context->saved_data["record"].toCapsule();
    const AttentionGradients inputs = static_cast<const SavedRecord*>(capsule.get())
                                          ->record->Backward(tensors[0], tensors[1], tensors[2],
                                                             tensors[3], tensors[4], gradients[0]);
    return {inputs.dq, inputs.dk, inputs.dv, Tensor(), Tensor()};
  }
};

}  // namespace

Tensor DifferentiableAttention(ContextAttention& attention, int layer, const Tensor& q,
                               const Tensor& k, const Tensor& v) {
  return AttentionFunction::apply(q, k, v, int64_t{layer}, &attention);
}

}  // namespace ringleader::attention::testing
