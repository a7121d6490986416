#include "worker/model/decoder/layer_passes.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace ringleader::model {
namespace {

using torch::Tensor;

// The packed projection's row: query heads, then key heads, then value heads; the first two kinds
// are rotated.
struct PackedHeads {
  PackedHeads(const Tensor& packed, const ModelConfig& config)
      : q(packed.slice(1, 0, config.heads)),
        k(packed.slice(1, config.heads, config.heads + config.kv_heads)),
        v(packed.slice(1, config.heads + config.kv_heads)) {}
  Tensor q, k, v;
};

// x weight^T (+ bias): [n, in] -> [n, out].
Tensor Linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return bias.defined() ? torch::addmm(bias, x, weight.t()) : x.mm(weight.t());
}

// The same, into y: the same bits, so that it does not matter which of the two backward repeats.
void LinearInto(Tensor y, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (bias.defined()) {
    at::addmm_out(y, bias, x, weight.t());
  } else {
    at::mm_out(y, x, weight.t());
  }
}

void AddBiasGradient(const Tensor& dy, const Tensor& d_bias) {
  if (d_bias.defined()) d_bias.add_(dy.sum(0, /*keepdim=*/false, torch::kFloat));
}

// One product for q, k and v, and their rotation in place. normed: [n, hidden].
Tensor Project(const LayerContext& context, const LayerParameters& parameters,
               const Tensor& normed) {
  const ModelConfig& config = context.config;
  Tensor packed = Linear(normed, parameters.qkv_weight, parameters.qkv_bias)
                      .view({normed.size(0), config.heads + 2 * config.kv_heads, config.head_dim});
  const PackedHeads heads(packed, config);
  context.ops.Rotate(heads.q, heads.k, context.rotary, /*inverse=*/false, heads.q, heads.k);
  return packed;
}

// begin and end of every chunk of tokens.
template <typename Body>
void ForChunks(int64_t tokens, int64_t chunk, Body body) {
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    body(begin, std::min(begin + chunk, tokens));
  }
}

// Whether each row's label has a logit that is larger than every other; overwrites the logits.
Tensor IsLargest(const Tensor& logits, const Tensor& labels) {
  const Tensor kept = labels.ne(kIgnoreLabel);
  const Tensor index = labels.masked_fill(~kept, 0).unsqueeze(1);
  const Tensor own = logits.gather(1, index);
  Tensor others = logits;
  others.scatter_(1, index, -std::numeric_limits<double>::infinity());
  return own.squeeze(1).gt(others.amax(1)).logical_and_(kept);
}

}  // namespace

void ForwardLayer(const LayerContext& context, int layer, const LayerParameters& parameters,
                  attention::ContextAttention& attention, ResidualStream& stream,
                  SavedLayer* saved) {
  const ModelConfig& config = context.config;
  const TokenOps& ops = context.ops;
  SavedLayer kept;
  {
    TokenOps::Norm norm = ops.NormForward(stream.base, stream.pending, parameters.input_norm,
                                          config.rms_norm_epsilon);
    stream = {};
    kept.input = std::move(norm.sum);
    kept.packed = Project(context, parameters, norm.y);
  }
  {
    const PackedHeads heads(kept.packed, config);
    attention::AttentionOutput attended = attention.Forward(layer, heads.q, heads.k, heads.v);
    kept.attended = std::move(attended.out);
    kept.lse = std::move(attended.lse);
    kept.record = std::move(attended.record);
  }
  if (context.recompute == Recompute::kFull || saved == nullptr) kept.packed.reset();

  const int64_t n = kept.input.size(0);
  TokenOps::Norm norm = ops.NormForward(
      kept.input,
      Linear(kept.attended.reshape({n, -1}), parameters.output_weight, parameters.output_bias),
      parameters.post_norm, config.rms_norm_epsilon);
  if (saved == nullptr) kept = {};
  // Down's rows take the place of the norm's, which their chunk has read.
  const bool keep_products = saved != nullptr && context.recompute == Recompute::kNone;
  if (keep_products) {
    kept.gate_up = torch::empty({n, 2 * config.intermediate_size}, norm.y.options());
  }
  ForChunks(n, context.mlp_chunk_tokens, [&](int64_t begin, int64_t end) {
    Tensor rows = norm.y.slice(0, begin, end);
    Tensor gate_up;
    if (keep_products) {
      gate_up = kept.gate_up.slice(0, begin, end);
      LinearInto(gate_up, rows, parameters.gate_up_weight, parameters.gate_up_bias);
    } else {
      gate_up = Linear(rows, parameters.gate_up_weight, parameters.gate_up_bias);
    }
    LinearInto(rows, ops.SwiGlu(gate_up), parameters.down_weight, parameters.down_bias);
  });
  if (keep_products) kept.middle = norm.sum;
  stream = {.base = std::move(norm.sum), .pending = std::move(norm.y)};
  if (saved != nullptr) *saved = std::move(kept);
}

Tensor BackwardLayer(const LayerContext& context, const LayerParameters& parameters,
                     const LayerParameters& gradients, SavedLayer saved, const Tensor& dy) {
  const ModelConfig& config = context.config;
  const TokenOps& ops = context.ops;
  const double epsilon = config.rms_norm_epsilon;
  const int64_t n = dy.size(0);
  const Tensor attended = saved.attended.reshape({n, -1});
  if (saved.packed.defined()) {  // keys and values travel while the MLP runs
    const PackedHeads heads(saved.packed, config);
    saved.record->StartBackward(heads.k, heads.v);
  }

  // MLP. The norm's rows are computed again under every policy: a pass over memory against keeping
  // them.
  Tensor d_middle;
  {
    TokenOps::Norm norm =
        saved.middle.defined()
            ? ops.NormForward(saved.middle, {}, parameters.post_norm, epsilon)
            : ops.NormForward(saved.input,
                              Linear(attended, parameters.output_weight, parameters.output_bias),
                              parameters.post_norm, epsilon);
    Tensor d_normed = torch::empty_like(norm.y);
    ForChunks(n, context.mlp_chunk_tokens, [&](int64_t begin, int64_t end) {
      const Tensor rows = norm.y.slice(0, begin, end), upstream = dy.slice(0, begin, end);
      const TokenOps::SwiGluGradient swiglu = ops.SwiGluBackward(
          upstream.mm(parameters.down_weight),
          saved.gate_up.defined()
              ? saved.gate_up.slice(0, begin, end)
              : Linear(rows, parameters.gate_up_weight, parameters.gate_up_bias));
      ops.AddWeightGradient(upstream, swiglu.activation, gradients.down_weight);
      ops.AddWeightGradient(swiglu.d_gate_up, rows, gradients.gate_up_weight);
      AddBiasGradient(swiglu.d_gate_up, gradients.gate_up_bias);
      Tensor d_rows = d_normed.slice(0, begin, end);
      at::mm_out(d_rows, swiglu.d_gate_up, parameters.gate_up_weight);
    });
    AddBiasGradient(dy, gradients.down_bias);
    saved.gate_up.reset();
    saved.middle.reset();
    // Both branches of the residual.
    d_middle = ops.NormBackward(d_normed, norm.sum, norm.rstd, parameters.post_norm, dy,
                                gradients.post_norm);
  }

  ops.AddWeightGradient(d_middle, attended, gradients.output_weight);
  AddBiasGradient(d_middle, gradients.output_bias);
  const Tensor d_attended = d_middle.mm(parameters.output_weight).view(saved.attended.sizes());

  TokenOps::Norm norm = ops.NormForward(saved.input, {}, parameters.input_norm, epsilon);
  if (!saved.packed.defined()) saved.packed = Project(context, parameters, norm.y);
  Tensor d_packed;
  {
    const PackedHeads heads(saved.packed, config);
    const attention::AttentionGradients d =
        saved.record->Backward(heads.q, heads.k, heads.v, saved.attended, saved.lse, d_attended);
    // Gathered into one row each, so that two products serve all three; q, k and v are not needed
    // any more.
    d_packed = saved.packed;
    ops.Rotate(d.dq, d.dk, context.rotary, /*inverse=*/true, heads.q, heads.k);
    heads.v.copy_(d.dv);
  }
  saved.attended.reset();
  const Tensor rows = d_packed.view({n, -1});
  ops.AddWeightGradient(rows, norm.y, gradients.qkv_weight);
  AddBiasGradient(rows, gradients.qkv_bias);
  Tensor d_normed = std::move(norm.y);
  at::mm_out(d_normed, rows, parameters.qkv_weight);
  return ops.NormBackward(d_normed, norm.sum, norm.rstd, parameters.input_norm, d_middle,
                          gradients.input_norm);
}

TokenScores LossPass(const TokenOps& ops, const Tensor& hidden, const Tensor& head,
                     const Tensor& labels, const Tensor& d_head, int64_t chunk_tokens) {
  const int64_t n = hidden.size(0), vocab = head.size(0);
  // Rows are padded to what the kernels load at once.
  const Tensor buffer =
      torch::empty({std::min(chunk_tokens, n), (vocab + 7) / 8 * 8}, hidden.options());
  const bool gradient = d_head.defined();
  TokenScores scores;
  scores.losses = torch::empty({n}, hidden.options().dtype(torch::kFloat));
  if (!gradient) scores.right = torch::empty({n}, hidden.options().dtype(torch::kBool));
  ForChunks(n, chunk_tokens, [&](int64_t begin, int64_t end) {
    Tensor rows = hidden.slice(0, begin, end);
    Tensor logits = buffer.slice(0, 0, end - begin).slice(1, 0, vocab);
    at::mm_out(logits, rows, head.t());
    const Tensor wanted = labels.slice(0, begin, end);
    scores.losses.slice(0, begin, end).copy_(ops.CrossEntropy(logits, wanted, gradient));
    if (!gradient) {
      scores.right.slice(0, begin, end).copy_(IsLargest(logits, wanted));
      return;
    }
    ops.AddWeightGradient(logits, rows, d_head);
    at::mm_out(rows, logits, head);  // the hidden states have served
  });
  return scores;
}

}  // namespace ringleader::model
