#include "worker/model/decoder/decoder.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>

#include "model_shape/rope_frequencies.h"
#include "worker/model/decoder/layer_ops.h"
#include "worker/model/decoder/loss.h"

namespace ringleader::model {
namespace {

// Hands out leaf tensors that alias the flat buffers, their .grad included, so that the optimizer
// works on the flat buffers and never sees single parameters.
class LeafMaker {
 public:
  LeafMaker(const torch::Tensor& parameters, const torch::Tensor& gradients)
      : parameters_(parameters), gradients_(gradients) {}

  torch::Tensor Make(const SlotGroup& group) const {
    if (group.shape.empty()) return {};
    torch::Tensor leaf = ViewGroup(group, parameters_, 0).detach().requires_grad_(true);
    // A gradient that is there already is added to in place: backward fills the flat buffer.
    leaf.mutable_grad() = ViewGroup(group, gradients_, 0).detach();
    return leaf;
  }

 private:
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
  const LeafMaker leaf(parameters_, gradients_);
  const auto whole = [&](const char* name) { return leaf.Make(FindGroup(layout_, "", {name})); };
  embedding_ = whole("model.embed_tokens.weight");
  final_norm_ = whole("model.norm.weight");
  head_ = config_.tied_embeddings ? embedding_ : whole("lm_head.weight");
  for (int64_t i = 0; i < config_.layers; ++i) {
    layers_.push_back(
        MakeLayerParameters(layout_, i, [&](const SlotGroup& group) { return leaf.Make(group); }));
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
