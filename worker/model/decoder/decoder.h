// Qwen2 and Llama decoders trained layer by layer, without autograd: parameters come from a store
// and gradients go back to it while backward runs, so that a rank need hold neither whole; backward
// recomputes what the policy says. The same on CPUs and GPUs, which differ in their TokenOps.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "model_shape/memory_estimate.h"
#include "model_shape/model_config.h"
#include "model_shape/parameter_layout.h"
#include "model_shape/precision.h"
#include "worker/attention/runner/context_attention.h"
#include "worker/model/decoder/parameter_store.h"
#include "worker/model/memory/saved_layers.h"
#include "worker/model/token_ops/token_ops.h"

namespace ringleader::model {

struct DecoderOptions {
  RecomputePlan recompute;
  // Where recompute.host_layers > 0; must outlive the decoder.
  HostCopies* host_copies = nullptr;
  // The MLP runs over this many tokens at a time; bounds what a layer in work takes.
  int64_t mlp_chunk_tokens = 32768;
  // Logits exist for this many tokens at a time.
  int64_t loss_chunk_tokens = 8192;
  Precision precision = Precision::kModelType;
};

// This rank's part of one sequence: [n] int64 each, on the model's device. `sequence_length`: for
// how long a sequence the rotary embedding is made. labels: the next token, kIgnoreLabel where
// there is none.
struct TokenBatch {
  torch::Tensor tokens, positions, labels;
  int64_t sequence_length = 0;
};

// Not thread-safe. On a GPU it enqueues on LibTorch's current stream and never waits for the
// device; c10::Error from LibTorch, attention or the store ends the step.
class Decoder {
 public:
  // ops and store must outlive this.
  Decoder(ModelConfig config, const TokenOps& ops, ParameterStore& store,
          const DecoderOptions& options);

  const ModelConfig& config() const { return config_; }
  const ParameterLayout& layout() const { return layout_; }

  // Whether the next passes' products read casts, where options.precision has any; they do unless
  // told otherwise. A forward and its backward are one pass. c10::Error as the store's.
  void SetReadsCasts(bool reads_casts) {
    reads_casts_ = reads_casts;
    store_.SetReadsCasts(reads_casts);
  }

  // The summed cross entropy of the labelled tokens, an fp64 scalar on the device. Adds its
  // gradient to the store's buffers, so micro-batches add up. On the CPU, tokens and labels outside
  // the vocabulary are c10::Errors.
  torch::Tensor ForwardBackward(const TokenBatch& batch, attention::ContextAttention& attention);

  // Every token's loss, and whether its label is what the model would say; without gradients.
  TokenScores Score(const TokenBatch& batch, attention::ContextAttention& attention);

  // [n, vocab], for tests and small n.
  torch::Tensor Logits(const TokenBatch& batch, attention::ContextAttention& attention);

 private:
  class Pass;

  // Those of a rotary embedding; copied when they change alone, for such a copy waits for a GPU.
  torch::Tensor OnDevice(const std::vector<float>& inverse_frequencies, torch::Device device);

  ModelConfig config_;
  ParameterLayout layout_;
  const TokenOps& ops_;
  ParameterStore& store_;
  DecoderOptions options_;
  bool reads_casts_ = true;
  std::vector<float> inverse_frequencies_;
  torch::Tensor inverse_on_device_;  // of them
};

}  // namespace ringleader::model
