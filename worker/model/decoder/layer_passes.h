// Forward and backward of one decoder layer, and of the head, without autograd: what Decoder
// runs one after another. n local tokens; activations [n, hidden] in the model's type.
#pragma once

#include <torch/types.h>

#include <memory>

#include "model_shape/model_config.h"
#include "worker/attention/runner/context_attention.h"
#include "worker/model/decoder/layer_parameters.h"
#include "worker/model/decoder/weight_casts.h"
#include "worker/model/token_ops/token_ops.h"

namespace ringleader::model {

// The residual stream: base + pending, which the next norm adds up on its way. pending may be
// undefined.
struct ResidualStream {
  torch::Tensor base, pending;
};

// What forward keeps of a layer for its backward, by the recompute policy.
struct SavedLayer {
  torch::Tensor input;     // [n, hidden]
  torch::Tensor packed;    // [n, heads + 2 kv_heads, d], rotated; kNone and kAttentionOnly
  torch::Tensor attended;  // [n, heads, d]
  torch::Tensor lse;       // [heads, n] fp32
  torch::Tensor middle;    // [n, hidden], the stream after attention; kNone
  torch::Tensor gate_up;   // [n, 2 intermediate]; kNone
  std::shared_ptr<const attention::AttentionRecord> record;
};

struct LayerContext {
  const ModelConfig& config;
  const TokenOps& ops;
  Recompute recompute;
  int64_t mlp_chunk_tokens;
  Rotary rotary;
  // The casts of the layer's weights; null where products read the model's type.
  LayerCasts* casts;
};

// Runs a layer and advances `stream`. `saved` may be null: nothing is kept.
void ForwardLayer(const LayerContext& context, int layer, const LayerParameters& parameters,
                  attention::ContextAttention& attention, ResidualStream& stream,
                  SavedLayer* saved);

// dy: the gradient of the layer's output, its rows cast where the context has casts. Adds to
// `gradients` (fp32) and returns the gradient of its input in form_below, kValues or kBoth. Takes
// `saved` and dy apart, to free them early.
Operand BackwardLayer(const LayerContext& context, const LayerParameters& parameters,
                      const LayerParameters& gradients, SavedLayer saved, Operand dy,
                      Form form_below);

// softmax(hidden head^T) against labels, with logits for `chunk_tokens` tokens at a time. With
// d_head
// ([vocab, hidden] fp32) defined: adds the gradient of the losses' sum to it, the hidden states'
// gradient takes their place, and `right` is left undefined.
TokenScores LossPass(const TokenOps& ops, const torch::Tensor& hidden, const torch::Tensor& head,
                     const torch::Tensor& labels, const torch::Tensor& d_head,
                     int64_t chunk_tokens);

}  // namespace ringleader::model
