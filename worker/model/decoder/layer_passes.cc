#include "worker/model/decoder/layer_passes.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "worker/model/decoder/linear.h"

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

// A layer's products.
struct LayerProducts {
  LayerProducts(const LayerContext& context, const LayerParameters& p)
      : qkv(context.ops, p.qkv_weight, p.qkv_bias, context.casts, Weight::kQkv),
        output(context.ops, p.output_weight, p.output_bias, context.casts, Weight::kOutput),
        gate_up(context.ops, p.gate_up_weight, p.gate_up_bias, context.casts, Weight::kGateUp),
        down(context.ops, p.down_weight, p.down_bias, context.casts, Weight::kDown) {}
  Linear qkv, output, gate_up, down;
};

void AddBiasGradient(const Tensor& dy, const Tensor& d_bias) {
  if (d_bias.defined()) d_bias.add_(dy.sum(0, /*keepdim=*/false, torch::kFloat));
}

// One product for q, k and v, and their rotation in place. normed: [n, hidden].
Tensor Project(const LayerContext& context, const Linear& qkv, const Operand& normed) {
  const ModelConfig& config = context.config;
  Tensor packed =
      qkv.Forward(normed).view({-1, config.heads + 2 * config.kv_heads, config.head_dim});
  qkv.Done();
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

// Whether each row's label has a logit that is larger than every other. The logits are as before.
Tensor IsLargest(const Tensor& logits, const Tensor& labels) {
  const Tensor kept = labels.ne(kIgnoreLabel);
  const Tensor index = labels.masked_fill(~kept, 0).unsqueeze(1);
  const Tensor own = logits.gather(1, index);
  logits.scatter_(1, index, -std::numeric_limits<double>::infinity());  // the others are left
  const Tensor others = logits.amax(1);
  logits.scatter_(1, index, own);
  return own.squeeze(1).gt(others).logical_and_(kept);
}

}  // namespace

void ForwardLayer(const LayerContext& context, int layer, const LayerParameters& parameters,
                  attention::ContextAttention& attention, ResidualStream& stream,
                  SavedLayer* saved) {
  const ModelConfig& config = context.config;
  const TokenOps& ops = context.ops;
  const LayerProducts products(context, parameters);
  SavedLayer kept;
  {
    TokenOps::Norm norm = ops.NormForward(stream.base, stream.pending, parameters.input_norm,
                                          config.rms_norm_epsilon, products.qkv.read());
    stream = {};
    kept.input = std::move(norm.sum);
    kept.packed = Project(context, products.qkv, norm.y);
  }
  Operand attended;
  {
    const PackedHeads heads(kept.packed, config);
    attention.SetCasts(products.output.read() == Form::kRows);
    attention::AttentionOutput output = attention.Forward(layer, heads.q, heads.k, heads.v);
    kept.attended = std::move(output.out);
    kept.lse = std::move(output.lse);
    kept.record = std::move(output.record);
    attended = {.values = kept.attended.reshape({heads.q.size(0), -1}),
                .rows = {.codes = std::move(output.codes), .scales = std::move(output.scales)}};
    if (products.output.read() == Form::kRows && !attended.rows.defined()) {
      attended = products.output.Read(attended.values);
    }
  }
  if (context.recompute == Recompute::kFull || saved == nullptr) kept.packed.reset();

  const int64_t n = kept.input.size(0);
  TokenOps::Norm norm =
      ops.NormForward(kept.input, products.output.Forward(attended), parameters.post_norm,
                      config.rms_norm_epsilon, products.gate_up.read());
  products.output.Done();
  attended = {};
  if (saved == nullptr) kept = {};
  // Down's rows take the place of the norm's, where there are some, which their chunk has read.
  Tensor pending = norm.y.values.defined() ? norm.y.values : torch::empty_like(norm.sum);
  const bool keep_products = saved != nullptr && context.recompute == Recompute::kNone;
  if (keep_products) {
    kept.gate_up = torch::empty({n, 2 * config.intermediate_size}, norm.sum.options());
  }
  ForChunks(n, context.mlp_chunk_tokens, [&](int64_t begin, int64_t end) {
    const Operand rows = SliceRows(norm.y, begin, end);
    Tensor gate_up;
    if (keep_products) {
      gate_up = kept.gate_up.slice(0, begin, end);
      products.gate_up.Forward(rows, gate_up);
    } else {
      gate_up = products.gate_up.Forward(rows);
    }
    products.down.Forward(ops.SwiGlu(gate_up, products.down.read()), pending.slice(0, begin, end));
  });
  products.gate_up.Done();
  products.down.Done();
  if (keep_products) kept.middle = norm.sum;
  stream = {.base = std::move(norm.sum), .pending = std::move(pending)};
  if (saved != nullptr) *saved = std::move(kept);
}

Operand BackwardLayer(const LayerContext& context, const LayerParameters& parameters,
                      const LayerParameters& gradients, SavedLayer saved, Operand dy,
                      Form form_below) {
  const ModelConfig& config = context.config;
  const TokenOps& ops = context.ops;
  const LayerProducts products(context, parameters);
  const double epsilon = config.rms_norm_epsilon;
  const int64_t n = dy.values.size(0);
  const Tensor attended = saved.attended.reshape({n, -1});
  if (saved.packed.defined()) {  // keys and values travel while the MLP runs
    const PackedHeads heads(saved.packed, config);
    saved.record->StartBackward(heads.k, heads.v);
  }

  // MLP. The norm's rows are computed again under every policy: a pass over memory against keeping
  // them.
  Operand d_middle;
  {
    const Form form = products.gate_up.read();
    // Of casts only a bias's gradient reads the values.
    const Form swiglu_form =
        gradients.gate_up_bias.defined() ? products.gate_up.read_twice() : form;
    TokenOps::Norm norm =
        saved.middle.defined()
            ? ops.NormForward(saved.middle, {}, parameters.post_norm, epsilon, form)
            : ops.NormForward(saved.input, products.output.Forward(products.output.Read(attended)),
                              parameters.post_norm, epsilon, form);
    const Tensor d_normed = torch::empty_like(norm.sum);
    ForChunks(n, context.mlp_chunk_tokens, [&](int64_t begin, int64_t end) {
      const Operand rows = SliceRows(norm.y, begin, end), upstream = SliceRows(dy, begin, end);
      TokenOps::SwiGluGradient swiglu =
          ops.SwiGluBackward(products.down.InputGradient(upstream),
                             saved.gate_up.defined() ? saved.gate_up.slice(0, begin, end)
                                                     : products.gate_up.Forward(rows),
                             swiglu_form);
      products.down.AddWeightGradient(upstream, swiglu.activation, gradients.down_weight);
      swiglu.activation = {};  // what the next gradient sums over, turned, needs the memory
      products.gate_up.AddWeightGradient(swiglu.d_gate_up, rows, gradients.gate_up_weight);
      AddBiasGradient(swiglu.d_gate_up.values, gradients.gate_up_bias);
      products.gate_up.InputGradient(swiglu.d_gate_up, d_normed.slice(0, begin, end));
    });
    AddBiasGradient(dy.values, gradients.down_bias);
    products.gate_up.Done();
    products.down.Done();
    saved.gate_up.reset();
    saved.middle.reset();
    // Both branches of the residual.
    d_middle = ops.NormBackward(d_normed, norm.sum, norm.rstd, parameters.post_norm, dy.values,
                                gradients.post_norm, products.output.read_twice());
    dy = {};
  }

  products.output.AddWeightGradient(d_middle, products.output.Read(attended),
                                    gradients.output_weight);
  AddBiasGradient(d_middle.values, gradients.output_bias);
  const Tensor d_attended = products.output.InputGradient(d_middle).view(saved.attended.sizes());
  products.output.Done();
  d_middle.rows = {};

  TokenOps::Norm norm =
      ops.NormForward(saved.input, {}, parameters.input_norm, epsilon, products.qkv.read());
  if (!saved.packed.defined()) saved.packed = Project(context, products.qkv, norm.y);
  Operand rows;  // the gradient of q, k and v
  {
    const PackedHeads heads(saved.packed, config);
    const attention::AttentionGradients d =
        saved.record->Backward(heads.q, heads.k, heads.v, saved.attended, saved.lse, d_attended);
    // Gathered into one row each, so that two products serve all three; q, k and v are not needed
    // any more. Of casts only a bias's gradient reads the values.
    const Form form =
        gradients.qkv_bias.defined() ? products.qkv.read_twice() : products.qkv.read();
    rows = ops.RotateBack(d.dq, d.dk, d.dv, context.rotary, saved.packed, form);
  }
  saved.packed.reset();
  saved.attended.reset();
  products.qkv.AddWeightGradient(rows, norm.y, gradients.qkv_weight);
  AddBiasGradient(rows.values, gradients.qkv_bias);
  // Where there are values, they have served.
  const Tensor d_normed = norm.y.values.defined() ? norm.y.values : torch::empty_like(norm.sum);
  products.qkv.InputGradient(rows, d_normed);
  products.qkv.Done();
  return ops.NormBackward(d_normed, norm.sum, norm.rstd, parameters.input_norm, d_middle.values,
                          gradients.input_norm, form_below);
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
    if (!gradient) scores.right.slice(0, begin, end).copy_(IsLargest(logits, wanted));
    scores.losses.slice(0, begin, end).copy_(ops.CrossEntropy(logits, wanted, gradient));
    if (!gradient) return;
    ops.AddWeightGradient(logits, rows, d_head);
    at::mm_out(rows, logits, head);  // the hidden states have served
  });
  return scores;
}

}  // namespace ringleader::model
