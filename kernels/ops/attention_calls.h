// Attention of a batch of whole sequences over an engine: the walk that the CPU's and the GPU's
// operators share. An engine (cpu_ops.cc, cuda_ops.cc) has
//   Element, kElement: the type of its q, k and v
//   Take(name, x): x, [batch, heads, tokens, d], as [batch, tokens, heads, d] of that type with
//     strides that it can read; throws, naming it, where it does not take x
//   kRoundsAtOnce: whether its kernels write an output of that type where one call is all of it
//   StartSums(out): fp32 memory of the size of one sequence's output, to which calls add
//   Finish(sums, lse, out): that output rounded to `out`, dense
//   Delta(d_out, out, delta): AttentionBackwardArgs::delta of one sequence
//   Run(args): one call of its kernels, for each argument struct; with Visit::Rows() for tiles, of
//     which it may gather the queries that chose apart
//   Groups, ListGroups(of, sizes, most, memory): KeyGroups of one sequence's chosen groups, of
//     which a tile keeps so many at most, in memory of that type
//   kAddsGroupsInOrder: whether gradients of groups have the same bits every time
//   GatherColumns, ScatterColumns: those of kernels/sm90/columns.h, without the stream
// What can fail returns absl::Status. All of it is enqueued on the current stream.
#pragma once

#include <torch/types.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ops/check_status.h"
#include "kernels/ops/token_view.h"
#include "kernels/ops/visit/visit.h"

namespace ringleader::kernels::ops {

template <typename Element>
TokenMajor<const Element> Read(const torch::Tensor& x) {
  return TokenView(x, static_cast<const Element*>(x.const_data_ptr()));
}
template <typename Element>
TokenMajor<Element> WriteTo(const torch::Tensor& x) {
  return TokenView(x, static_cast<Element*>(x.mutable_data_ptr()));
}
inline TokenMajor<float> AddTo(const torch::Tensor& x) {
  return WriteTo<float>(x);
}

template <typename Engine>
class AttentionCalls {
 public:
  using Element = typename Engine::Element;
  using Tensor = torch::Tensor;

  AttentionCalls(Engine& engine, const AttentionSizes& sizes, const Visit& visit, double scale)
      : engine_(engine),
        sizes_(sizes),
        visit_(visit),
        rows_(visit.Rows()),
        scale_(static_cast<float>(scale)) {}

  // out: [batch, heads, tokens, d], of q's type; lse: [batch, heads, tokens]
  std::tuple<Tensor, Tensor> Forward(const Tensor& q, const Tensor& k, const Tensor& v) {
    const Tensor queries = engine_.Take("q", q), keys = engine_.Take("k", k),
                 values = engine_.Take("v", v);
    const Tensor out = torch::empty({sizes_.batch, sizes_.tokens, sizes_.heads, sizes_.head_dim},
                                    q.options().dtype(Engine::kElement));
    const Tensor lse = torch::full({sizes_.batch, sizes_.heads, sizes_.tokens},
                                   -std::numeric_limits<float>::infinity(), FloatsLike(q));
    const bool at_once =
        Engine::kRoundsAtOnce && !rows_ && visit_.max_columns() == 0 && !visit_.has_groups();
    for (int64_t b = 0; b < sizes_.batch; ++b) {
      float* const lse_of_b = lse[b].mutable_data_ptr<float>();
      typename Engine::Groups groups;
      AttentionForwardArgs<Element> args = {.q = Read<Element>(queries[b]),
                                            .k = Read<Element>(keys[b]),
                                            .v = Read<Element>(values[b]),
                                            .lse = lse_of_b,
                                            .query_layout = visit_.query_layout(),
                                            .key_layout = visit_.key_layout(),
                                            .tiles = TilesOf(b, &groups),
                                            .scale = scale_};
      if (at_once) {
        args.rounded_out = WriteTo<Element>(out[b]);
        Check(engine_.Run(args, rows_));
        continue;
      }
      const Tensor sums = engine_.StartSums(out[b]);
      args.out = AddTo(sums);
      Check(engine_.Run(args, rows_));
      if (visit_.max_columns() > 0) {
        const Columns columns = Gather(keys[b], values[b], b);
        Check(engine_.Run(ColumnForwardArgs<Element>{.q = Read<Element>(queries[b]),
                                                     .keys = Data(columns.keys),
                                                     .values = Data(columns.values),
                                                     .columns = visit_.Columns(b),
                                                     .tiles = visit_.Tiles(b),
                                                     .query_layout = sizes_.layout(),
                                                     .out = AddTo(sums),
                                                     .lse = lse_of_b,
                                                     .scale = scale_}));
      }
      Check(engine_.Finish(sums, lse_of_b, out[b]));
    }
    return {out.to(q.scalar_type()).transpose(1, 2), lse};
  }

  // Gradients of forward's inputs, from those of out and lse; without one of these it is zero.
  std::tuple<Tensor, Tensor, Tensor> Backward(const std::optional<Tensor>& d_out,
                                              const std::optional<Tensor>& d_lse, const Tensor& q,
                                              const Tensor& k, const Tensor& v, const Tensor& out,
                                              const Tensor& lse, bool deterministic) {
    const Tensor queries = engine_.Take("q", q), keys = engine_.Take("k", k),
                 values = engine_.Take("v", v), outputs = engine_.Take("out", out),
                 d_outputs = engine_.Take("d_out", d_out ? *d_out : torch::zeros_like(out));
    TORCH_CHECK(
        Engine::kAddsGroupsInOrder || !deterministic || !visit_.has_groups(),
        "deterministic: GPUs add gradients of key groups in any order; take another choice, "
        "or leave it out (torch.use_deterministic_algorithms sets it, too)");
    const Tensor logarithms = lse.contiguous();
    const Tensor dq =
        torch::empty({sizes_.batch, sizes_.tokens, sizes_.heads, sizes_.head_dim}, q.options());
    const Tensor dk =
        torch::empty({sizes_.batch, sizes_.tokens, sizes_.kv_heads, sizes_.head_dim}, k.options());
    const Tensor dv = torch::empty_like(dk);
    for (int64_t b = 0; b < sizes_.batch; ++b) {
      const Tensor delta = torch::empty({sizes_.heads, sizes_.tokens}, FloatsLike(q));
      Check(engine_.Delta(d_outputs[b], outputs[b], delta));
      // A row's sum grows with its logits by their shares of it.
      if (d_lse) delta.sub_((*d_lse)[b]);
      const Sums sums = {.dq = torch::zeros(dq[b].sizes(), FloatsLike(q)),
                         .dk = torch::zeros(dk[b].sizes(), FloatsLike(q)),
                         .dv = torch::zeros(dv[b].sizes(), FloatsLike(q))};
      const float* const lse_of_b = logarithms[b].template const_data_ptr<float>();
      typename Engine::Groups groups;
      Check(engine_.Run(AttentionBackwardArgs<Element>{.q = Read<Element>(queries[b]),
                                                       .k = Read<Element>(keys[b]),
                                                       .v = Read<Element>(values[b]),
                                                       .d_out = Read<Element>(d_outputs[b]),
                                                       .lse = lse_of_b,
                                                       .delta = delta.const_data_ptr<float>(),
                                                       .dq = AddTo(sums.dq),
                                                       .dk = AddTo(sums.dk),
                                                       .dv = AddTo(sums.dv),
                                                       .query_layout = visit_.query_layout(),
                                                       .key_layout = visit_.key_layout(),
                                                       .tiles = TilesOf(b, &groups),
                                                       .scale = scale_,
                                                       .deterministic = deterministic},
                        rows_));
      if (visit_.max_columns() > 0) {
        ColumnsBackward(queries[b], keys[b], values[b], d_outputs[b], lse_of_b, delta, sums, b,
                        deterministic);
      }
      dq[b].copy_(sums.dq);
      dk[b].copy_(sums.dk);
      dv[b].copy_(sums.dv);
    }
    return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
  }

 private:
  struct Columns {
    Tensor keys, values;  // [heads, max_columns, d]
  };
  // The gradients of one sequence.
  struct Sums {
    Tensor dq;      // [tokens, heads, d]
    Tensor dk, dv;  // [tokens, kv_heads, d]
  };

  static torch::TensorOptions FloatsLike(const Tensor& x) {
    return x.options().dtype(torch::kFloat);
  }
  static const Element* Data(const Tensor& x) {
    return static_cast<const Element*>(x.const_data_ptr());
  }

  // What sequence `b` visits, groups of keys included, whose lists are then in *groups.
  TileSelection TilesOf(int64_t b, typename Engine::Groups* groups) {
    TileSelection tiles = visit_.Tiles(b);
    if (visit_.has_groups()) {
      const absl::StatusOr<KeyGroups> listed =
          engine_.ListGroups(visit_.Groups(b), sizes_, visit_.most_groups(), groups);
      Check(listed.status());
      tiles.groups = *listed;
    }
    return tiles;
  }

  Columns Gather(const Tensor& k, const Tensor& v, int64_t b) {
    const Tensor keys =
        torch::zeros({sizes_.heads, visit_.max_columns(), sizes_.head_dim}, k.options());
    Columns columns = {keys, torch::zeros_like(keys)};
    Check(engine_.GatherColumns(Read<Element>(k), Read<Element>(v), sizes_.layout(),
                                visit_.Columns(b), static_cast<int32_t>(sizes_.heads),
                                static_cast<Element*>(columns.keys.mutable_data_ptr()),
                                static_cast<Element*>(columns.values.mutable_data_ptr())));
    return columns;
  }

  // Columns are gathered again rather than kept: that copies thousands of rows, where keeping them
  // would take their memory in all layers.
  void ColumnsBackward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& d_out,
                       const float* lse, const Tensor& delta, const Sums& sums, int64_t b,
                       bool deterministic) {
    const Columns columns = Gather(k, v, b);
    const Tensor d_keys = torch::zeros(columns.keys.sizes(), FloatsLike(q)),
                 d_values = torch::zeros_like(d_keys);
    Check(engine_.Run(ColumnBackwardArgs<Element>{.q = Read<Element>(q),
                                                  .d_out = Read<Element>(d_out),
                                                  .keys = Data(columns.keys),
                                                  .values = Data(columns.values),
                                                  .columns = visit_.Columns(b),
                                                  .tiles = visit_.Tiles(b),
                                                  .query_layout = sizes_.layout(),
                                                  .lse = lse,
                                                  .delta = delta.const_data_ptr<float>(),
                                                  .dq = AddTo(sums.dq),
                                                  .d_keys = d_keys.mutable_data_ptr<float>(),
                                                  .d_values = d_values.mutable_data_ptr<float>(),
                                                  .scale = scale_,
                                                  .deterministic = deterministic}));
    Check(engine_.ScatterColumns(
        d_keys.const_data_ptr<float>(), d_values.const_data_ptr<float>(), sizes_.layout(),
        visit_.Columns(b), static_cast<int32_t>(sizes_.heads), AddTo(sums.dk), AddTo(sums.dv)));
  }

  Engine& engine_;
  const AttentionSizes sizes_;
  const Visit& visit_;
  const std::optional<QueryRowsPlan> rows_;
  const float scale_;
};

}  // namespace ringleader::kernels::ops
