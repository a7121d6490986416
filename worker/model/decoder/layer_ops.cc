#include "worker/model/decoder/layer_ops.h"

#include <optional>

#include "worker/model/decoder/elementwise.h"

namespace ringleader::model {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// autograd::Function takes an absent tensor as an empty optional only.
using MaybeTensor = std::optional<Tensor>;

MaybeTensor Maybe(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

// x weight^T (+ bias): [n, in] -> [n, out].
Tensor Linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return bias.defined() ? torch::addmm(bias, x, weight.t()) : x.mm(weight.t());
}

Tensor BiasGradient(const Tensor& dy, const Tensor& bias) {
  return bias.defined() ? dy.sum(0) : Tensor();
}

// The decoder's last norm; the others are part of the two functions below.
class RmsNormFunction : public torch::autograd::Function<RmsNormFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                        double epsilon) {
    NormResult result = NormForward(x, weight, epsilon);
    context->save_for_backward({x, weight, result.rstd});
    return result.y;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    NormGradient gradient = NormBackward(gradients[0], saved[0], saved[2], saved[1]);
    return {gradient.dx, gradient.dweight, {}};
  }
};

// The packed projection's row: query heads, then key heads, then value heads; the first two kinds
// are rotated.
struct Heads {
  int64_t query, kv, dim;
  int64_t all() const { return query + 2 * kv; }
  int64_t rotated() const { return query + kv; }
};

// norm -> one product for q, k and v -> rotation of q and k, in place.
class ProjectQkvFunction : public torch::autograd::Function<ProjectQkvFunction> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& x, const Tensor& norm,
                               const Tensor& weight, const MaybeTensor& maybe_bias,
                               const Tensor& cos, const Tensor& sin, int64_t query_heads,
                               int64_t kv_heads, double epsilon, bool recompute) {
    const Tensor bias = maybe_bias.value_or(Tensor());
    const NormResult normed = NormForward(x, norm, epsilon);
    const int64_t n = x.size(0);
    const Heads heads{query_heads, kv_heads, weight.size(0) / (query_heads + 2 * kv_heads)};
    const Tensor packed = Linear(normed.y, weight, bias).view({n, heads.all(), heads.dim});
    const Tensor rotated = packed.slice(1, 0, heads.rotated());
    Rotate(rotated, cos, sin, /*inverse=*/false, rotated);

    // The product itself is not kept: backward needs its input only, and attention keeps q, k and v
    // for itself.
    context->save_for_backward(
        {x, norm, weight, bias, cos, sin, normed.rstd, recompute ? Tensor() : normed.y});
    context->saved_data["query_heads"] = query_heads;
    context->saved_data["kv_heads"] = kv_heads;
    return {packed.slice(1, 0, query_heads), packed.slice(1, query_heads, heads.rotated()),
            packed.slice(1, heads.rotated())};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &norm = saved[1], &weight = saved[2], &bias = saved[3];
    const Tensor &cos = saved[4], &sin = saved[5], &rstd = saved[6];
    const int64_t query_heads = context->saved_data["query_heads"].toInt();
    const int64_t kv_heads = context->saved_data["kv_heads"].toInt();
    const int64_t n = x.size(0);
    const Heads heads{query_heads, kv_heads, weight.size(0) / (query_heads + 2 * kv_heads)};

    // The gradients of q, k and v are gathered into one row each, so that two products serve all
    // three.
    const Tensor dpacked = torch::empty({n, heads.all(), heads.dim}, x.options());
    Rotate(gradients[0], cos, sin, /*inverse=*/true, dpacked.slice(1, 0, query_heads));
    Rotate(gradients[1], cos, sin, /*inverse=*/true,
           dpacked.slice(1, query_heads, heads.rotated()));
    dpacked.slice(1, heads.rotated()).copy_(gradients[2]);

    const Tensor dy = dpacked.view({n, -1});
    const Tensor normed = saved[7].defined() ? saved[7] : NormRecompute(x, rstd, norm);
    NormGradient gradient = NormBackward(dy.mm(weight), x, rstd, norm);
    return {gradient.dx,
            gradient.dweight,
            dy.t().mm(normed),
            BiasGradient(dy, bias),
            {},
            {},
            {},
            {},
            {},
            {}};
  }
};

// h = x + attention Wo;  y = h + swiglu(norm(h) Wgate, norm(h) Wup) Wdown.
class OutputAndMlpFunction : public torch::autograd::Function<OutputAndMlpFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& attention,
                        const Tensor& output_weight, const MaybeTensor& maybe_output_bias,
                        const Tensor& norm, const Tensor& gate_up_weight,
                        const MaybeTensor& maybe_gate_up_bias, const Tensor& down_weight,
                        const MaybeTensor& maybe_down_bias, double epsilon, bool recompute) {
    const Tensor output_bias = maybe_output_bias.value_or(Tensor());
    const Tensor gate_up_bias = maybe_gate_up_bias.value_or(Tensor());
    const Tensor down_bias = maybe_down_bias.value_or(Tensor());
    const Tensor rows = attention.reshape({x.size(0), -1});
    const Inner inner = ForwardInner(x, rows, output_weight, output_bias, norm, gate_up_weight,
                                     gate_up_bias, epsilon);
    Tensor y = torch::addmm(inner.h, SwiGlu(inner.gate_up), down_weight.t());
    if (down_bias.defined()) y.add_(down_bias);

    // Unless all is recomputed: two products fewer in backward for 3 hidden + 2 inner floats a
    // token.
    variable_list saved = {rows,           output_weight, output_bias, norm,
                           gate_up_weight, gate_up_bias,  down_weight, down_bias};
    if (recompute) {
      saved.push_back(x);
    } else {
      saved.insert(saved.end(), {inner.h, inner.rstd, inner.normed, inner.gate_up});
    }
    context->save_for_backward(std::move(saved));
    context->saved_data["epsilon"] = epsilon;
    context->saved_data["recompute"] = recompute;
    context->saved_data["attention_shape"] = attention.sizes();
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &rows = saved[0], &output_weight = saved[1], &output_bias = saved[2];
    const Tensor &norm = saved[3], &gate_up_weight = saved[4], &gate_up_bias = saved[5];
    const Tensor &down_weight = saved[6], &down_bias = saved[7];
    const Inner inner =
        context->saved_data["recompute"].toBool()
            ? ForwardInner(saved[8], rows, output_weight, output_bias, norm, gate_up_weight,
                           gate_up_bias, context->saved_data["epsilon"].toDouble())
            : Inner{saved[8], saved[9], saved[10], saved[11]};

    const Tensor& dy = gradients[0];
    // The activation falls out of its gradient's pass again, so forward need not keep it.
    const SwiGluGradient swiglu = SwiGluBackward(dy.mm(down_weight), inner.gate_up);
    const Tensor ddown = dy.t().mm(swiglu.activation);
    const Tensor dgate_up = swiglu.dgate_up.t().mm(inner.normed);
    NormGradient normed =
        NormBackward(swiglu.dgate_up.mm(gate_up_weight), inner.h, inner.rstd, norm);
    const Tensor dh = normed.dx.add_(dy);  // both branches of the residual; also the gradient of x
    const Tensor dattention =
        dh.mm(output_weight).view(context->saved_data["attention_shape"].toIntVector());
    return {dh,
            dattention,
            dh.t().mm(rows),
            BiasGradient(dh, output_bias),
            normed.dweight,
            dgate_up,
            BiasGradient(swiglu.dgate_up, gate_up_bias),
            ddown,
            BiasGradient(dy, down_bias),
            {},
            {}};
  }

 private:
  // What backward needs of forward.
  struct Inner {
    Tensor h;        // [n, hidden], the residual stream after attention
    Tensor rstd;     // [n, 1]
    Tensor normed;   // [n, hidden]
    Tensor gate_up;  // [n, 2 inner]
  };

  static Inner ForwardInner(const Tensor& x, const Tensor& rows, const Tensor& output_weight,
                            const Tensor& output_bias, const Tensor& norm,
                            const Tensor& gate_up_weight, const Tensor& gate_up_bias,
                            double epsilon) {
    Inner inner;
    inner.h = torch::addmm(x, rows, output_weight.t());
    if (output_bias.defined()) inner.h.add_(output_bias);
    const NormResult normed = NormForward(inner.h, norm, epsilon);
    inner.rstd = normed.rstd;
    inner.normed = normed.y;
    inner.gate_up = Linear(normed.y, gate_up_weight, gate_up_bias);
    return inner;
  }
};

}  // namespace

Tensor RmsNorm(const Tensor& x, const Tensor& weight, double epsilon) {
  return RmsNormFunction::apply(x, weight, epsilon);
}

std::tuple<Tensor, Tensor, Tensor> ProjectQkv(const Tensor& x, const LayerParameters& layer,
                                              const RotaryTables& rotary, const ModelConfig& config,
                                              Recompute recompute) {
  const variable_list qkv = ProjectQkvFunction::apply(
      x, layer.input_norm, layer.qkv_weight, Maybe(layer.qkv_bias), rotary.cos, rotary.sin,
      config.heads, config.kv_heads, config.rms_norm_epsilon, recompute == Recompute::kFull);
  return {qkv[0], qkv[1], qkv[2]};
}

Tensor OutputAndMlp(const Tensor& x, const Tensor& attention, const LayerParameters& layer,
                    const ModelConfig& config, Recompute recompute) {
  return OutputAndMlpFunction::apply(
      x, attention, layer.output_weight, Maybe(layer.output_bias), layer.post_norm,
      layer.gate_up_weight, Maybe(layer.gate_up_bias), layer.down_weight, Maybe(layer.down_bias),
      config.rms_norm_epsilon, recompute == Recompute::kFull);
}

}  // namespace ringleader::model
