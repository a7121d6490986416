#include "worker/model/decoder.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/model/layer_ops.h"
#include "worker/model/loss.h"
#include "worker/model/rope.h"

namespace ringleader::model {
namespace {

// Hands out leaf tensors that alias the flat buffers, their .grad included, so that the optimizer
// works on the flat buffers and never sees single parameters.
class LeafMaker {
 public:
  LeafMaker(const ParameterLayout& layout, const torch::Tensor& parameters,
            const torch::Tensor& gradients)
      : layout_(layout), parameters_(parameters), gradients_(gradients) {}

  // The slots `names`, adjacent in the layout and stacked along their first dimension. Undefined if
  // the model has none.
  torch::Tensor Make(const std::string& prefix, const std::vector<const char*>& names) const {
    int64_t rows = 0, elements = 0;
    const ParameterSlot* first = nullptr;
    for (const char* name : names) {
      const ParameterSlot* slot = layout_.Find(prefix + name);
      if (slot == nullptr) return {};
      if (first == nullptr) first = slot;
      TORCH_CHECK(slot->offset == first->offset + elements, slot->name, " is not adjacent");
      rows += slot->shape[0];
      elements += slot->elements;
    }
    std::vector<int64_t> shape = first->shape;
    shape[0] = rows;
    torch::Tensor leaf =
        parameters_.narrow(0, first->offset, elements).view(shape).detach().requires_grad_(true);
    // A gradient that is there already is added to in place: backward fills the flat buffer.
    leaf.mutable_grad() = gradients_.narrow(0, first->offset, elements).view(shape).detach();
    return leaf;
  }

 private:
  const ParameterLayout& layout_;
  const torch::Tensor &parameters_, &gradients_;
};

RotaryTables MakeRotaryTables(const ModelConfig& config, const torch::Tensor& positions,
                              int64_t sequence_length) {
  const RopeFrequencies frequencies = ComputeRopeFrequencies(config, sequence_length);
  // Angles in fp32, as models are trained and run elsewhere: fp64 would turn far positions by other
  // amounts.
  const torch::Tensor inverse = torch::tensor(frequencies.inverse);
  const torch::Tensor angles = positions.to(torch::kFloat32).unsqueeze(1) * inverse;
  return {.cos = angles.cos().mul_(frequencies.attention_factor),
          .sin = angles.sin().mul_(frequencies.attention_factor)};
}

}  // namespace

Decoder::Decoder(ModelConfig config, int ranks, Recompute recompute)
    : config_(std::move(config)),
      layout_(MakeParameterLayout(config_)),
      recompute_(recompute),
      parameters_(torch::zeros({layout_.PaddedElements(ranks)}, torch::kFloat32)),
      gradients_(torch::zeros({layout_.PaddedElements(ranks)}, torch::kFloat32)) {
  // What the decoder multiplies by in one go is one leaf: q, k and v; gate and up.
  const LeafMaker leaf(layout_, parameters_, gradients_);
  embedding_ = leaf.Make("", {"model.embed_tokens.weight"});
  final_norm_ = leaf.Make("", {"model.norm.weight"});
  head_ = config_.tied_embeddings ? embedding_ : leaf.Make("", {"lm_head.weight"});
  for (int64_t i = 0; i < config_.layers; ++i) {
    const std::string layer = absl::StrCat("model.layers.", i, ".");
    const std::string attention = layer + "self_attn.", mlp = layer + "mlp.";
    layers_.push_back({
        .input_norm = leaf.Make(layer, {"input_layernorm.weight"}),
        .qkv_weight = leaf.Make(attention, {"q_proj.weight", "k_proj.weight", "v_proj.weight"}),
        .qkv_bias = leaf.Make(attention, {"q_proj.bias", "k_proj.bias", "v_proj.bias"}),
        .output_weight = leaf.Make(attention, {"o_proj.weight"}),
        .output_bias = leaf.Make(attention, {"o_proj.bias"}),
        .post_norm = leaf.Make(layer, {"post_attention_layernorm.weight"}),
        .gate_up_weight = leaf.Make(mlp, {"gate_proj.weight", "up_proj.weight"}),
        .gate_up_bias = leaf.Make(mlp, {"gate_proj.bias", "up_proj.bias"}),
        .down_weight = leaf.Make(mlp, {"down_proj.weight"}),
        .down_bias = leaf.Make(mlp, {"down_proj.bias"}),
    });
  }
}

torch::Tensor Decoder::Forward(const torch::Tensor& tokens, const torch::Tensor& positions,
                               int64_t sequence_length,
                               attention::LayerAttention& attention) const {
  const RotaryTables rotary = MakeRotaryTables(config_, positions, sequence_length);
  torch::Tensor x = torch::embedding(embedding_, tokens);  // [n, hidden], the residual stream
  for (int64_t i = 0; i < config_.layers; ++i) {
    const auto [q, k, v] = ProjectQkv(x, layers_[i], rotary, config_, recompute_);
    const torch::Tensor attended = attention.Forward(static_cast<int>(i), q, k, v);
    x = OutputAndMlp(x, attended, layers_[i], config_, recompute_);
  }
  return RmsNorm(x, final_norm_, config_.rms_norm_epsilon);
}

TokenLoss Decoder::Loss(const torch::Tensor& hidden, const torch::Tensor& labels) const {
  return {.sum = LinearCrossEntropySum(hidden, head_, labels, kIgnoreLabel),
          .tokens = labels.ne(kIgnoreLabel).sum().item<int64_t>()};
}

torch::Tensor Decoder::Logits(const torch::Tensor& hidden) const {
  return hidden.matmul(head_.t());
}

}  // namespace ringleader::model
