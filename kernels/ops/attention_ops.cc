#include "kernels/ops/attention_ops.h"

#include <torch/autograd.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/index/estimate.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/sm90/attention.h"
#include "kernels/sm90/columns.h"

namespace ringleader::kernels::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What an attention visits, kept alive between forward and backward.
struct Visit : torch::CustomClassHolder {
  TileSelection tiles;
  ColumnSelection columns;  // none: positions null
  std::vector<torch::Tensor> lists;
  float scale = 0.0f;
};

ShardLayout WholeSequence(int64_t tokens) {
  return {.tokens = tokens};
}

struct Gathered {
  torch::Tensor keys, values;  // [heads, max_columns, d]
};
Gathered Gather(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                const Visit& visit) {
  Gathered out = {torch::empty({q.size(1), visit.columns.max_columns, q.size(2)}, q.options()), {}};
  out.values = torch::empty_like(out.keys);
  Check(sm90::GatherColumns(View(k), View(v), WholeSequence(k.size(0)), visit.columns,
                            static_cast<int32_t>(q.size(1)), MutableBf16(out.keys),
                            MutableBf16(out.values), Stream()));
  return out;
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& q,
                               const torch::Tensor& k, const torch::Tensor& v,
                               const c10::intrusive_ptr<Visit>& visit) {
    const auto floats = q.options().dtype(torch::kFloat);
    const torch::Tensor out = torch::zeros(q.sizes(), floats);
    const torch::Tensor lse = torch::full({q.size(1), q.size(0)}, -INFINITY, floats);
    const ShardLayout layout = WholeSequence(q.size(0));
    Check(
        CallWithWorkspace(AttentionForwardArgs<__nv_bfloat16>{.q = View(q),
                                                              .k = View(k),
                                                              .v = View(v),
                                                              .out = FloatView(out),
                                                              .lse = lse.mutable_data_ptr<float>(),
                                                              .query_layout = layout,
                                                              .key_layout = layout,
                                                              .tiles = visit->tiles,
                                                              .scale = visit->scale},
                          q, sm90::ForwardWorkspaceBytes, sm90::AttentionForward));
    if (visit->columns.positions != nullptr) {
      const Gathered columns = Gather(q, k, v, *visit);
      Check(CallWithWorkspace(sm90::ColumnForwardArgs{.q = View(q),
                                                      .keys = Bf16(columns.keys),
                                                      .values = Bf16(columns.values),
                                                      .columns = visit->columns,
                                                      .tiles = visit->tiles,
                                                      .query_layout = layout,
                                                      .out = FloatView(out),
                                                      .lse = lse.mutable_data_ptr<float>(),
                                                      .scale = visit->scale},
                              q, sm90::ColumnForwardWorkspaceBytes, sm90::ColumnForward));
    }
    torch::Tensor rounded = out.to(torch::kBFloat16);
    context->save_for_backward({q, k, v, rounded, lse});
    context->saved_data["visit"] = c10::IValue::make_capsule(visit);
    return rounded;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const torch::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &lse = saved[4];
    const auto visit =
        c10::static_intrusive_pointer_cast<Visit>(context->saved_data["visit"].toCapsule());
    const torch::Tensor d_out = gradients[0].contiguous();
    const auto floats = q.options().dtype(torch::kFloat);
    // [heads, n], once for tiles and columns.
    const torch::Tensor delta = (d_out.to(torch::kFloat) * saved[3]).sum(-1).t().contiguous();
    const torch::Tensor dq = torch::zeros(q.sizes(), floats), dk = torch::zeros(k.sizes(), floats),
                        dv = torch::zeros(v.sizes(), floats);
    const ShardLayout layout = WholeSequence(q.size(0));
    const bool deterministic = at::globalContext().deterministicAlgorithms();
    Check(CallWithWorkspace(
        AttentionBackwardArgs<__nv_bfloat16>{.q = View(q),
                                             .k = View(k),
                                             .v = View(v),
                                             .d_out = View(d_out),
                                             .lse = lse.const_data_ptr<float>(),
                                             .delta = delta.const_data_ptr<float>(),
                                             .dq = FloatView(dq),
                                             .dk = FloatView(dk),
                                             .dv = FloatView(dv),
                                             .query_layout = layout,
                                             .key_layout = layout,
                                             .tiles = visit->tiles,
                                             .scale = visit->scale,
                                             .deterministic = deterministic},
        q, sm90::BackwardWorkspaceBytes, sm90::AttentionBackward));
    if (visit->columns.positions != nullptr) {
      // Columns are gathered again rather than kept: that copies thousands of rows, where keeping
      // them would take their memory in all layers.
      const Gathered columns = Gather(q, k, v, *visit);
      const torch::Tensor d_keys = torch::zeros(columns.keys.sizes(), floats),
                          d_values = torch::zeros(columns.keys.sizes(), floats);
      Check(
          CallWithWorkspace(sm90::ColumnBackwardArgs{.q = View(q),
                                                     .d_out = View(d_out),
                                                     .keys = Bf16(columns.keys),
                                                     .values = Bf16(columns.values),
                                                     .columns = visit->columns,
                                                     .tiles = visit->tiles,
                                                     .query_layout = layout,
                                                     .lse = lse.const_data_ptr<float>(),
                                                     .delta = delta.const_data_ptr<float>(),
                                                     .dq = FloatView(dq),
                                                     .d_keys = d_keys.mutable_data_ptr<float>(),
                                                     .d_values = d_values.mutable_data_ptr<float>(),
                                                     .scale = visit->scale,
                                                     .deterministic = deterministic},
                            q, sm90::ColumnBackwardWorkspaceBytes, sm90::ColumnBackward));
      Check(sm90::ScatterColumns(d_keys.const_data_ptr<float>(), d_values.const_data_ptr<float>(),
                                 layout, visit->columns, static_cast<int32_t>(q.size(1)),
                                 FloatView(dk), FloatView(dv), Stream()));
    }
    return {dq.to(torch::kBFloat16), dk.to(torch::kBFloat16), dv.to(torch::kBFloat16), {}};
  }
};

}  // namespace

torch::Tensor SparseAttention(const torch::Tensor& q, const torch::Tensor& k,
                              const torch::Tensor& v, const TileSelection& tiles,
                              const torch::TensorList& lists, double scale) {
  auto visit = c10::make_intrusive<Visit>();
  visit->tiles = tiles;
  visit->lists.assign(lists.begin(), lists.end());
  visit->scale = static_cast<float>(scale);
  return AttentionFunction::apply(q, k, v, visit);
}

TileSelection VerticalSlashIndex::Tiles() const {
  return {.pattern = TilePattern::kToeplitz,
          .tile = tile,
          .diagonals = reinterpret_cast<const uint64_t*>(diagonals.const_data_ptr<int64_t>()),
          .diagonal_words = static_cast<int32_t>(diagonals.size(1))};
}

ColumnSelection VerticalSlashIndex::Columns() const {
  return {.positions = column_positions.const_data_ptr<int64_t>(),
          .counts = column_counts.const_data_ptr<int32_t>(),
          .max_columns = static_cast<int32_t>(column_positions.size(1))};
}

VerticalSlashIndex BuildVerticalSlashIndex(const torch::Tensor& q, const torch::Tensor& k,
                                           const VerticalSlashOptions& options, double scale) {
  const torch::NoGradGuard no_grad;
  const int64_t n = q.size(0), heads = q.size(1);
  const int64_t queries = std::min<int64_t>(options.estimate_queries, n);
  const int64_t blocks = (n + options.tile - 1) / options.tile;
  const auto ints = q.options().dtype(torch::kInt), longs = q.options().dtype(torch::kLong),
             floats = q.options().dtype(torch::kFloat);
  const torch::Tensor positions = torch::arange(n - queries, n, longs);
  const torch::Tensor row_max = torch::empty({heads, queries}, floats),
                      row_sum = torch::empty({heads, queries}, longs),
                      run_sums = torch::empty({heads, queries, RunsOf(n)}, floats),
                      column_mass = torch::empty({heads, n}, ints),
                      diagonal_mass = torch::empty({heads, blocks}, ints),
                      candidate_mass = torch::empty({heads, options.max_columns}, ints),
                      candidate_positions = torch::empty({heads, options.max_columns}, ints),
                      residue_offsets = torch::empty({heads, 2}, ints),
                      residues = torch::empty({heads, blocks}, ints);
  const index::EstimateArgs estimate = {.q = View(q.slice(0, n - queries, n)),
                                        .query_positions = positions.const_data_ptr<int64_t>(),
                                        .k = View(k),
                                        .key_layout = WholeSequence(n),
                                        .tile = options.tile,
                                        .scale = static_cast<float>(scale),
                                        .row_max = row_max.mutable_data_ptr<float>(),
                                        .row_sum = row_sum.mutable_data_ptr<int64_t>(),
                                        .run_sums = run_sums.mutable_data_ptr<float>(),
                                        .column_mass = column_mass.mutable_data_ptr<int32_t>(),
                                        .diagonal_mass = diagonal_mass.mutable_data_ptr<int32_t>()};
  Check(index::EstimateRowMax(estimate, Stream()));
  Check(index::EstimateRowSum(estimate, Stream()));
  Check(index::EstimateMass(estimate, Stream()));
  Check(
      index::SelectColumnCandidates({.column_mass = column_mass.const_data_ptr<int32_t>(),
                                     .layout = WholeSequence(n),
                                     .heads = static_cast<int32_t>(heads),
                                     .max_columns = options.max_columns,
                                     .sink_tokens = options.sink_tokens,
                                     .mass = candidate_mass.mutable_data_ptr<int32_t>(),
                                     .positions = candidate_positions.mutable_data_ptr<int32_t>()},
                                    Stream()));
  VerticalSlashIndex out = {.column_positions = torch::empty({heads, options.max_columns}, longs),
                            .column_counts = torch::empty({heads}, ints),
                            .diagonals = torch::empty({heads, (blocks + 63) / 64}, longs),
                            .diagonal_counts = torch::empty({heads}, ints),
                            .load = torch::empty({1}, longs),
                            .masses = torch::empty({heads, 5}, longs),
                            .tile = options.tile};
  const torch::Tensor column_share = torch::full({heads}, options.column_mass, floats),
                      diagonal_share = torch::full({heads}, options.diagonal_mass, floats),
                      column_cap = torch::full({heads}, options.max_columns, ints),
                      diagonal_cap = torch::full({heads}, options.max_diagonals, ints);
  const torch::Tensor scratch =
      Scratch(static_cast<int64_t>(index::SelectWorkspaceBytes(static_cast<int32_t>(heads), n)), q);
  Check(index::Select(
      {.candidate_mass = candidate_mass.const_data_ptr<int32_t>(),
       .candidate_positions = candidate_positions.const_data_ptr<int32_t>(),
       .diagonal_mass = diagonal_mass.const_data_ptr<int32_t>(),
       .column_budgets = {column_share.const_data_ptr<float>(),
                          column_cap.const_data_ptr<int32_t>()},
       .diagonal_budgets = {diagonal_share.const_data_ptr<float>(),
                            diagonal_cap.const_data_ptr<int32_t>()},
       .layout = WholeSequence(n),
       .heads = static_cast<int32_t>(heads),
       .tile = options.tile,
       .max_columns = options.max_columns,
       .sink_tokens = options.sink_tokens,
       .local_blocks = options.local_blocks,
       .workspace = scratch.mutable_data_ptr(),
       .column_positions = out.column_positions.mutable_data_ptr<int64_t>(),
       .column_counts = out.column_counts.mutable_data_ptr<int32_t>(),
       .diagonals = reinterpret_cast<uint64_t*>(out.diagonals.mutable_data_ptr<int64_t>()),
       .diagonal_counts = out.diagonal_counts.mutable_data_ptr<int32_t>(),
       .residue_offsets = residue_offsets.mutable_data_ptr<int32_t>(),
       .residues = residues.mutable_data_ptr<int32_t>(),
       .load = out.load.mutable_data_ptr<int64_t>(),
       .masses = reinterpret_cast<index::IndexMass*>(out.masses.mutable_data_ptr<int64_t>())},
      Stream()));
  return out;
}

torch::Tensor VerticalSlashAttention(const torch::Tensor& q, const torch::Tensor& k,
                                     const torch::Tensor& v, const VerticalSlashIndex& index,
                                     double scale, const torch::Tensor& document_starts) {
  auto visit = c10::make_intrusive<Visit>();
  visit->tiles = index.Tiles();
  visit->columns = index.Columns();
  visit->lists = {index.column_positions, index.column_counts, index.diagonals};
  if (document_starts.defined()) {
    TORCH_CHECK(document_starts.device() == q.device() && document_starts.is_contiguous() &&
                    document_starts.dim() == 1 && document_starts.size(0) == q.size(0),
                "document_starts is ", document_starts.sizes(), " on ", document_starts.device(),
                "; it must be dense, [", q.size(0), "], on ", q.device());
    visit->tiles.document_starts = document_starts.const_data_ptr<int32_t>();
    visit->lists.push_back(document_starts);
  }
  visit->scale = static_cast<float>(scale);
  return AttentionFunction::apply(q, k, v, visit);
}

}  // namespace ringleader::kernels::ops
