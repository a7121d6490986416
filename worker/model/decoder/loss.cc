#include "worker/model/decoder/loss.h"

#include <algorithm>

namespace ringleader::model {
namespace {

// Large enough for efficient products, small enough that a chunk of logits stays around 32 MiB.
int64_t ChunkTokens(int64_t tokens, int64_t vocab) {
  constexpr int64_t kChunkElements = int64_t{8} << 20;
  return std::clamp<int64_t>(kChunkElements / vocab, 1, std::max<int64_t>(tokens, 1));
}

class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& hidden, const torch::Tensor& head,
                               const torch::Tensor& labels, int64_t ignore_label,
                               bool needs_gradient) {
    const int64_t tokens = hidden.size(0);
    const int64_t chunk = ChunkTokens(tokens, head.size(0));
    torch::Tensor sum = torch::zeros({}, hidden.options().dtype(torch::kFloat64));
    torch::Tensor d_hidden, d_head;
    if (needs_gradient) {
      d_hidden = torch::empty_like(hidden);
      d_head = torch::zeros_like(head);
    }
    for (int64_t begin = 0; begin < tokens; begin += chunk) {
      const int64_t end = std::min(begin + chunk, tokens);
      const torch::Tensor rows = hidden.slice(0, begin, end);              // [c, hidden]
      const torch::Tensor wanted = labels.slice(0, begin, end);            // [c]
      const torch::Tensor kept = wanted.ne(ignore_label);                  // [c]
      const torch::Tensor index = wanted.where(kept, 0).unsqueeze(1);      // [c, 1]
      torch::Tensor log_p = torch::log_softmax(rows.matmul(head.t()), 1);  // [c, vocab]
      const torch::Tensor losses = log_p.gather(1, index).squeeze(1).to(torch::kFloat64);
      // where, not a product: a label that does not count must not spread a NaN either.
      sum -= losses.where(kept, 0.0).sum();
      if (needs_gradient) {
        torch::Tensor d_logits = log_p.exp_();  // softmax - one_hot(label), rows without a label 0
        d_logits.scatter_add_(1, index, torch::full_like(index, -1.0, d_logits.options()));
        d_logits.mul_(kept.unsqueeze(1));
        torch::Tensor d_rows = d_hidden.slice(0, begin, end);
        at::mm_out(d_rows, d_logits, head);
        d_head.addmm_(d_logits.t(), rows);
      }
    }
    context->save_for_backward({d_hidden, d_head});
    return sum;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    const torch::Tensor scale = gradients[0].to(saved[0].scalar_type());
    return {saved[0] * scale, saved[1] * scale, {}, {}, {}};
  }
};

}  // namespace

torch::Tensor LinearCrossEntropySum(const torch::Tensor& hidden, const torch::Tensor& head,
                                    const torch::Tensor& labels, int64_t ignore_label) {
  const bool needs_gradient =
      torch::GradMode::is_enabled() && (hidden.requires_grad() || head.requires_grad());
  return LinearCrossEntropy::apply(hidden, head, labels, ignore_label, needs_gradient);
}

}  // namespace ringleader::model
