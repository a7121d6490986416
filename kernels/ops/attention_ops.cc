#include "kernels/ops/attention_ops.h"

#include <ATen/autocast_mode.h>
#include <torch/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <vector>

namespace ringleader::kernels::ops {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

TORCH_LIBRARY(ringleader, m) {
  // `pattern` is a TilePattern, kUnmaskedLists or kKeyGroups; visit/visit.h says what lists and
  // size are, and topk_blocks and density (KeptBlocks). Without a scale it is 1 / sqrt(head_dim);
  // without `deterministic` it is what LibTorch's global context says. What a call from Python
  // leaves out costs it nothing.
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, int pattern, Tensor[] lists, "
      "Tensor? documents=None, Tensor? intervals=None, int tile=128, int size=0, "
      "int topk_blocks=0, float density=0, float? scale=None, bool? deterministic=None) -> (Tensor "
      "out, Tensor lse)");
  // The same without lse, which Python would make an object of, and free.
  m.def(
      "attention_output(Tensor q, Tensor k, Tensor v, int pattern, Tensor[] lists, "
      "Tensor? documents=None, Tensor? intervals=None, int tile=128, int size=0, "
      "int topk_blocks=0, float density=0, float? scale=None, bool? deterministic=None) -> Tensor");
  m.def(
      "attention_backward(Tensor? d_out, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse, int pattern, Tensor[] lists, Tensor? documents, Tensor? intervals, "
      "int tile, int size, int topk_blocks, float density, float? scale, bool deterministic) -> "
      "(Tensor dq, Tensor dk, Tensor dv)");
  // chosen: [batch, heads, tiles, BlockWords(blocks)] int32, bits (block_choice.h). Returns kCsr's
  // lists, without tiles that no query sees; columns and rows have `capacity` elements.
  m.def(
      "tile_lists(Tensor chosen, int tokens, int tile, int block_size, int capacity) -> "
      "(Tensor row_offsets, Tensor columns, Tensor column_offsets, Tensor rows)");
  // SpreadPosition (ringleader/kernels/index.h) of `count` queries, [count] int64, on q's device.
  m.def("spread_positions(Tensor q, int count) -> Tensor");
  m.def(
      "choose_vertical_slash(Tensor q, Tensor k, Tensor positions, Tensor? starts, int tile, "
      "float scale, float column_mass, float diagonal_mass, int max_columns, int max_diagonals, "
      "float density, int sink_tokens, int local_blocks) -> (Tensor diagonals, "
      "Tensor column_positions, Tensor column_counts, Tensor visited)");
  // QueryGateStep's chosen and queries.
  m.def(
      "choose_moba(Tensor q, Tensor k, Tensor? documents, int tile, int block_size, "
      "int topk_blocks, float density) -> (Tensor chosen, Tensor queries)");
  // AntidiagonalGateStep's chosen.
  m.def(
      "choose_xattention(Tensor q, Tensor k, Tensor? documents, int tile, int stride, float scale, "
      "float threshold, float density) -> Tensor");
  // kKeyGroups' lists.
  m.def(
      "choose_key_groups(Tensor q, Tensor k, Tensor? documents, float scale, float density) -> "
      "(Tensor diagonals, Tensor bits, Tensor rows)");
}

namespace {

using Lists = at::TensorList;
using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, int64_t,
                                           Lists, const std::optional<Tensor>&,
                                           const std::optional<Tensor>&, int64_t, int64_t, int64_t,
                                           double, std::optional<double>, std::optional<bool>);
using Backward = std::tuple<Tensor, Tensor, Tensor>(
    const std::optional<Tensor>&, const std::optional<Tensor>&, const Tensor&, const Tensor&,
    const Tensor&, const Tensor&, const Tensor&, int64_t, Lists, const std::optional<Tensor>&,
    const std::optional<Tensor>&, int64_t, int64_t, int64_t, double, std::optional<double>, bool);

template <typename Signature>
c10::TypedOperatorHandle<Signature> Find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Sizes are not looked at here, where a compiler may trace with symbols for them.
class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& q, const Tensor& k,
                               const Tensor& v, int64_t pattern, std::vector<Tensor> lists,
                               const std::optional<Tensor>& documents,
                               const std::optional<Tensor>& intervals, int64_t tile, int64_t size,
                               int64_t topk_blocks, double density, std::optional<double> scale,
                               std::optional<bool> deterministic) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = Find<Forward>("ringleader::attention");
    auto [out, lse] = op.call(q, k, v, pattern, lists, documents, intervals, tile, size,
                              topk_blocks, density, scale, deterministic);
    variable_list saved = {
        q, k, v, out, lse, documents.value_or(Tensor()), intervals.value_or(Tensor())};
    saved.insert(saved.end(), lists.begin(), lists.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["pattern"] = pattern;
    context->saved_data["tile"] = tile;
    context->saved_data["size"] = size;
    context->saved_data["topk_blocks"] = topk_blocks;
    context->saved_data["density"] = density;
    context->saved_data["scale"] = scale;
    context->saved_data["deterministic"] =
        deterministic.value_or(at::globalContext().deterministicAlgorithms());
    context->set_materialize_grads(false);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto maybe = [](const Tensor& x) {
      return x.defined() ? std::optional<Tensor>(x) : std::nullopt;
    };
    auto& data = context->saved_data;
    static const auto op = Find<Backward>("ringleader::attention_backward");
    const auto [dq, dk, dv] =
        op.call(maybe(gradients[0]), maybe(gradients[1]), saved[0], saved[1], saved[2], saved[3],
                saved[4], data["pattern"].toInt(), Lists(saved).slice(7), maybe(saved[5]),
                maybe(saved[6]), data["tile"].toInt(), data["size"].toInt(),
                data["topk_blocks"].toInt(), data["density"].toDouble(),
                data["scale"].toOptional<double>(), data["deterministic"].toBool());
    return {dq, dk, dv, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  }
};

std::tuple<Tensor, Tensor> AttentionAutograd(const Tensor& q, const Tensor& k, const Tensor& v,
                                             int64_t pattern, Lists lists,
                                             const std::optional<Tensor>& documents,
                                             const std::optional<Tensor>& intervals, int64_t tile,
                                             int64_t size, int64_t topk_blocks, double density,
                                             std::optional<double> scale,
                                             std::optional<bool> deterministic) {
  const variable_list outputs =
      AttentionFunction::apply(q, k, v, pattern, lists.vec(), documents, intervals, tile, size,
                               topk_blocks, density, scale, deterministic);
  return {outputs[0], outputs[1]};
}

// Under torch.autocast attention is computed in its type, as PyTorch's own is.
std::tuple<Tensor, Tensor> AttentionAutocast(const Tensor& q, const Tensor& k, const Tensor& v,
                                             int64_t pattern, Lists lists,
                                             const std::optional<Tensor>& documents,
                                             const std::optional<Tensor>& intervals, int64_t tile,
                                             int64_t size, int64_t topk_blocks, double density,
                                             std::optional<double> scale,
                                             std::optional<bool> deterministic) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autocast_dispatch_keyset);
  static const auto op = Find<Forward>("ringleader::attention");
  const auto type = at::autocast::get_autocast_dtype(q.device().type());
  return op.call(q.to(type), k.to(type), v.to(type), pattern, lists, documents, intervals, tile,
                 size, topk_blocks, density, scale, deterministic);
}

Tensor AttentionOutput(const Tensor& q, const Tensor& k, const Tensor& v, int64_t pattern,
                       Lists lists, const std::optional<Tensor>& documents,
                       const std::optional<Tensor>& intervals, int64_t tile, int64_t size,
                       int64_t topk_blocks, double density, std::optional<double> scale,
                       std::optional<bool> deterministic) {
  static const auto op = Find<Forward>("ringleader::attention");
  return std::get<0>(op.call(q, k, v, pattern, lists, documents, intervals, tile, size, topk_blocks,
                             density, scale, deterministic));
}

// By LibTorch's operators, wherever q is. A compiler that saw them would multiply what arange
// counts in 32 bits.
Tensor SpreadPositions(const Tensor& q, int64_t count) {
  const int64_t tokens = q.size(2);
  const Tensor numbers = torch::arange(count, q.options().dtype(torch::kLong));
  const Tensor begins = (numbers * tokens).floor_divide(count),
               ends = ((numbers + 1) * tokens).floor_divide(count);
  const Tensor places =
      ((numbers + 1) * static_cast<int64_t>(0x9e3779b97f4a7c15u)).__rshift__(40) & 0xffffff;
  return begins + (places * (ends - begins)).__rshift__(24);
}

}  // namespace

TORCH_LIBRARY_IMPL(ringleader, CompositeImplicitAutograd, m) {
  m.impl("attention_output", AttentionOutput);
}
TORCH_LIBRARY_IMPL(ringleader, CompositeExplicitAutograd, m) {
  m.impl("spread_positions", SpreadPositions);
}
TORCH_LIBRARY_IMPL(ringleader, AutocastCPU, m) {
  m.impl("attention", AttentionAutocast);
}
TORCH_LIBRARY_IMPL(ringleader, AutocastCUDA, m) {
  m.impl("attention", AttentionAutocast);
}

TORCH_LIBRARY_IMPL(ringleader, Autograd, m) {
  m.impl("attention", AttentionAutograd);
  // A second derivative is refused.
  m.impl("attention_backward", torch::autograd::autogradNotImplementedFallback());
}

std::tuple<Tensor, Tensor> Attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Visited& visited, double scale, bool deterministic) {
  static const auto op = Find<Forward>("ringleader::attention");
  return op.call(q, k, v, static_cast<int64_t>(visited.pattern), visited.lists, visited.documents,
                 visited.intervals, visited.tile, visited.size, visited.topk_blocks,
                 visited.density, scale, deterministic);
}

VerticalSlashChoice ChooseVerticalSlash(const Tensor& q, const Tensor& k, const Tensor& positions,
                                        const std::optional<Tensor>& starts, double scale,
                                        const VerticalSlashOptions& options) {
  using Choose = std::tuple<Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t, double,
      double, double, int64_t, int64_t, double, int64_t, int64_t);
  static const auto op = Find<Choose>("ringleader::choose_vertical_slash");
  const auto [diagonals, positions_of_columns, counts, visited] =
      op.call(q, k, positions, starts, options.tile, scale, options.column_mass,
              options.diagonal_mass, options.max_columns, options.max_diagonals, options.density,
              options.sink_tokens, options.local_blocks);
  return {diagonals, positions_of_columns, counts, visited};
}

}  // namespace ringleader::kernels::ops
