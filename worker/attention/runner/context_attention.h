// Attention over the ranks that share a sequence, whichever engine computes it: RingAttention on
// the CPU, CreateCudaRingAttention on GPUs. What the trainer holds, and what a model that
// recomputes its layers calls.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "patterns/attention_options.h"
#include "patterns/index/head_budgets.h"
#include "ring/document_layout.h"
#include "ringleader/kernels/attention.h"
#include "worker/attention/stats/attention_stats.h"

namespace ringleader::attention {

struct AttentionGradients {
  torch::Tensor dq, dk, dv;  // dense, of the shape and type of q, k and v
};

// What one forward call attended to. Small against its tensors; serves its backward, also after the
// attention object is gone.
class AttentionRecord {
 public:
  virtual ~AttentionRecord() = default;
  // Backward with these k and v will be the next call: what it begins with, keys and values on
  // their way to other ranks, may start now and travel while the caller computes something else.
  // Need not be called; all ranks do alike. c10::Error as from Forward.
  virtual void StartBackward(const torch::Tensor& /*k*/, const torch::Tensor& /*v*/) const {}
  // q, k and v hold the values that forward took, kept or computed again; out and lse are what it
  // returned. c10::Error as from Forward.
  virtual AttentionGradients Backward(const torch::Tensor& q, const torch::Tensor& k,
                                      const torch::Tensor& v, const torch::Tensor& out,
                                      const torch::Tensor& lse,
                                      const torch::Tensor& d_out) const = 0;
};

struct AttentionOutput {
  torch::Tensor out;  // [n, heads, d], of q's type
  // Its values in e4m3 with a scale for a token, a power of two (kernels/e4m3.h), where SetCasts
  // asks for them and what makes the output makes them, too: codes [n, heads * d] Float8_e4m3fn,
  // scales [n, 1] fp32. Undefined elsewhere.
  torch::Tensor codes = {}, scales = {};
  torch::Tensor lse;  // float32, for Backward: [heads, n], where heads are shared out of what this
                      // rank attended with, which is as much
  std::shared_ptr<const AttentionRecord> record;
};

// Not thread-safe. All ranks make the same calls in the same order.
class ContextAttention {
 public:
  virtual ~ContextAttention() = default;

  // Attention of this rank's tokens to the whole sequence, which has n * ranks tokens. q: [n,
  // heads, d], k and v: [n, kv_heads, d], rotary embedding applied; any strides with a dense last
  // dimension. A caller that keeps out, lse and the record, and rebuilds q, k and v for backward,
  // never computes attention twice. c10::Error names what does not fit or went wrong in the ring.
  virtual AttentionOutput Forward(int layer, const torch::Tensor& q, const torch::Tensor& k,
                                  const torch::Tensor& v) = 0;

  // Forward of the layer with these k and v will be the next call: keys and values may start to
  // travel. Need not be called; all ranks do alike. c10::Error as from Forward.
  virtual void StartForward(int /*layer*/, const torch::Tensor& /*k*/, const torch::Tensor& /*v*/) {
  }

  // Whether all layers attend to everything from the next forward on, or as the options say, as
  // at the start. Must be called alike on all ranks, between steps.
  virtual void SetDense(bool dense) = 0;

  // The documents packed into the sequences of the next forwards: a query attends to keys of its
  // own document alone, also in the forwards' backward. `firsts`: positions in the sequence of
  // `tokens` tokens with which a document starts, ascending from 0; one or none: no mask, as at the
  // start. The last document may be `padding` tokens that say nothing. Must be called alike on all
  // ranks, and again for every sequence. Under a mask that is not causal to be called before the
  // first forward; no firsts: one document. `prefix_ends`: under Mask::kPrefixLm, where in the
  // sequence each document's prefix ends. INVALID_ARGUMENT names what does not fit.
  virtual absl::Status SetDocuments(int64_t tokens, std::span<const int64_t> firsts,
                                    int64_t padding, std::span<const int64_t> prefix_ends) = 0;
  absl::Status SetDocuments(int64_t tokens, std::span<const int64_t> firsts, int64_t padding = 0) {
    return SetDocuments(tokens, firsts, padding, /*prefix_ends=*/{});
  }

  // What each query of the sequences of the next forwards sees, [tokens] by position, in place of
  // SetDocuments: a mask that jobs have no name for. Must be called alike on all ranks.
  // INVALID_ARGUMENT but for dense attention under Mask::kFull, whose documents are not laid out by
  // themselves, and where patterns::MakeListed says so.
  virtual absl::Status SetVisible(std::span<const kernels::KeyIntervals> /*queries*/) {
    return absl::InvalidArgumentError(
        "what queries see cannot be listed where documents are laid out by themselves");
  }

  // The same where documents lie as `layout` says (AttentionOptions::by_documents): of attention
  // over a ring, those that are spread.
  virtual absl::Status SetLayout(const ring::DocumentLayout& layout) = 0;

  // The next forwards are of training step `step`, 1 being the first; 0, as at the start: of none,
  // such as an evaluation. Must be called alike on all ranks. Says which
  // steps probe the recall (attention.probe_every).
  virtual void SetStep(uint64_t step) = 0;

  // attention.balance: the next forwards' choices keep `factor` of the work that they would, so
  // that this group of ranks comes to the anchor of the groups. 1, as at the start: what they
  // would; ranks of the group may still be brought to each other. Must be called alike on all ranks
  // of the group. Forwards of no step are never moved.
  virtual void SetMove(float factor) = 0;

  // AttentionOptions::adapt_by_probe: the next forwards' heads have these budgets, by layer; a
  // layer that is not there, or whose budgets are empty, has equal ones, as at the start. Must be
  // called alike on all ranks. Elsewhere without effect.
  virtual void SetHeadBudgets(std::span<const patterns::LayerBudgets> /*layers*/) {}

  // The forwards since the last call, or TakeStats, were one micro-batch's, whose tiles are counted
  // apart, too (AttentionStats::micro_batches).
  virtual void MarkMicroBatch() = 0;

  // Whether the next forwards' output is read in e4m3, too; not, as at the start.
  virtual void SetCasts(bool /*casts*/) {}

  // What happened since the last call; resets it. On a GPU the one wait for the device in a step;
  // c10::Error if the device has failed.
  virtual AttentionStats TakeStats() = 0;
};

}  // namespace ringleader::attention
