// Qwen2 and Llama decoders over a flat parameter buffer.
#pragma once

#include <torch/types.h>

#include <memory>
#include <vector>

#include "model_shape/model_config.h"
#include "model_shape/parameter_layout.h"
#include "worker/attention/runner/layer_attention.h"
#include "worker/model/decoder/layer_parameters.h"
#include "worker/model/decoder/token_ops.h"

namespace ringleader::model {

// Sum over the labelled tokens; ranks add both up and divide. `sum` is an fp64 scalar,
// differentiable.
struct TokenLoss {
  torch::Tensor sum;
  int64_t tokens = 0;
};

// Not thread-safe. Parameters and gradients are fp32 on CPU.
class Decoder {
 public:
  // Allocates parameters (zero) and gradients for a model whose flat buffers are shared by `ranks`
  // shards.
  Decoder(ModelConfig config, int ranks, Recompute recompute);

  const ModelConfig& config() const { return config_; }
  const ParameterLayout& layout() const { return layout_; }

  // Flat buffers of layout().PaddedElements(ranks). Backward adds into gradients(); writing to
  // parameters() between steps changes the model.
  float* parameters() { return parameters_.data_ptr<float>(); }
  const float* parameters() const { return parameters_.const_data_ptr<float>(); }
  float* gradients() { return gradients_.data_ptr<float>(); }
  int64_t padded_elements() const { return parameters_.numel(); }
  void ZeroGradients() { gradients_.zero_(); }

  // tokens, positions: [n] int64, this rank's part of one sequence of `sequence_length` tokens in
  // all. Returns the normalised hidden states [n, hidden]. c10::Error if a token is not in the
  // vocabulary.
  torch::Tensor Forward(const torch::Tensor& tokens, const torch::Tensor& positions,
                        int64_t sequence_length, attention::LayerAttention& attention) const;

  // Cross entropy of the next-token logits; labels: [n] int64, kIgnoreLabel where there is none.
  // Logits exist for one chunk of tokens at a time, and the gradient is computed on the way (no
  // second pass over the vocabulary).
  TokenLoss Loss(const torch::Tensor& hidden, const torch::Tensor& labels) const;

  // [n, vocab], for tests and small n.
  torch::Tensor Logits(const torch::Tensor& hidden) const;

 private:
  ModelConfig config_;
  ParameterLayout layout_;
  Recompute recompute_;
  torch::Tensor parameters_, gradients_;  // [padded]
  torch::Tensor embedding_, final_norm_, head_;
  std::vector<LayerParameters> layers_;  // leaf tensors that alias the flat buffers
};

}  // namespace ringleader::model
