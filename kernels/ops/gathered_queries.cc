#include "kernels/ops/gathered_queries.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/ops/cuda_call.h"

namespace ringleader::kernels::ops {

using torch::Tensor;

namespace {

// Where rows lie for the kernels' causal mask: all of their keys come before them.
ShardLayout BehindAllKeys(int64_t rows, int64_t tokens) {
  const auto parts = static_cast<int32_t>(tokens / rows + 2);
  return {.ranks = parts, .rank = parts - 1, .tokens = parts * rows};
}

TileSelection TilesOfRows(const index::QueryRowsArgs& lists, int32_t first_head,
                          const int32_t* starts) {
  return {.pattern = TilePattern::kCsr,
          .tile = lists.tile,
          .row_offsets = lists.row_offsets + first_head * (lists.tiles() + 1),
          .columns = lists.columns,
          .column_offsets = lists.column_offsets + first_head * (lists.key_tiles() + 1),
          .rows = lists.rows,
          .document_starts = starts};
}

// One head of many.
template <typename T>
TokenMajor<T> HeadOf(TokenMajor<T> all, int32_t head) {
  all.data += head * all.head_stride;
  all.heads = 1;
  return all;
}

// Tensors [heads, rows, d] as the kernels take them.
template <typename T>
TokenMajor<T> RowsView(T* data, const Tensor& rows) {
  return {data,
          rows.size(1),
          static_cast<int32_t>(rows.size(0)),
          static_cast<int32_t>(rows.size(2)),
          rows.size(2),
          rows.size(1) * rows.size(2)};
}
TokenMajor<const __nv_bfloat16> QueryView(const Tensor& rows) {
  return RowsView(Bf16(rows), rows);
}
TokenMajor<float> SumView(const Tensor& rows) {
  return RowsView(rows.mutable_data_ptr<float>(), rows);
}

// The gathered rows of plan.heads heads, in memory that all heads use in turn.
class GatheredRows {
 public:
  // from: of all heads' queries, for backward with d_out
  GatheredRows(const QueryRowsPlan& plan, const index::GatherQueriesArgs& from,
               const torch::TensorOptions& device)
      : args_(from),
        q_(torch::empty({plan.heads, plan.capacity, from.q.head_dim},
                        device.dtype(torch::kBFloat16))),
        lse_(torch::empty({plan.heads, plan.capacity}, device.dtype(torch::kFloat))) {
    args_.rows_q = MutableBf16(q_);
    args_.rows_lse = lse_.mutable_data_ptr<float>();
    if (from.d_out.data != nullptr) {
      d_out_ = torch::empty_like(q_);
      delta_ = torch::empty_like(lse_);
      args_.rows_d_out = MutableBf16(d_out_);
      args_.rows_delta = delta_.mutable_data_ptr<float>();
    }
    if (from.document_starts != nullptr) {
      starts_ = torch::empty({plan.capacity}, device.dtype(torch::kInt));
      args_.rows_starts = starts_.mutable_data_ptr<int32_t>();
    }
  }

  absl::Status Gather(const index::QueryRowsArgs& lists, index::HeadRange heads) const {
    return index::GatherQueries(lists, heads, args_, Stream());
  }

  TokenMajor<const __nv_bfloat16> q() const { return QueryView(q_); }          // [rows, heads, d]
  TokenMajor<const __nv_bfloat16> d_out() const { return QueryView(d_out_); }  // [rows, heads, d]
  float* lse() const { return args_.rows_lse; }                                // [heads, rows]
  const float* delta() const { return args_.rows_delta; }                      // [heads, rows]
  const int32_t* starts() const { return args_.rows_starts; }                  // [rows], or null
  // For sums over the rows: [heads, rows, d] fp32.
  Tensor NewSums() const { return torch::empty(q_.sizes(), lse_.options()); }
  const Tensor& like() const { return q_; }

 private:
  index::GatherQueriesArgs args_;
  Tensor q_, lse_, d_out_, delta_, starts_;
};

}  // namespace

absl::StatusOr<std::vector<Tensor>> ListTiles(index::TileListsArgs choice, int64_t kept_blocks,
                                              const Tensor& like, TileSelection* tiles) {
  const auto tiles_of = [&](const ShardLayout& layout) {
    return (layout.local_tokens() + choice.tile - 1) / choice.tile;
  };
  const int64_t query_tiles = tiles_of(choice.query_layout),
                key_tiles = tiles_of(choice.key_layout);
  // No list can be longer.
  choice.capacity = choice.heads * query_tiles *
                    std::min(key_tiles, kept_blocks * (choice.block_size / choice.tile));
  if (choice.capacity > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%d queries of a trainer and %d keys in %d heads may list %d tiles, and lists have up to "
        "%d; choose fewer blocks (attention.density, attention.topk_blocks) or larger tiles, or "
        "share the sequence among more trainers",
        choice.query_layout.local_tokens(), choice.key_layout.local_tokens(), choice.heads,
        choice.capacity, std::numeric_limits<int32_t>::max()));
  }
  const auto ints = like.options().dtype(torch::kInt);
  const Tensor row_offsets = torch::empty({choice.heads, query_tiles + 1}, ints),
               columns = torch::empty({choice.capacity}, ints),
               column_offsets = torch::empty({choice.heads, key_tiles + 1}, ints),
               rows = torch::empty({choice.capacity}, ints);
  choice.row_offsets = row_offsets.mutable_data_ptr<int32_t>();
  choice.columns = columns.mutable_data_ptr<int32_t>();
  choice.column_offsets = column_offsets.mutable_data_ptr<int32_t>();
  choice.rows = rows.mutable_data_ptr<int32_t>();
  RETURN_IF_ERROR(index::BuildTileLists(choice, Stream()));
  tiles->row_offsets = choice.row_offsets;
  tiles->columns = choice.columns;
  tiles->column_offsets = choice.column_offsets;
  tiles->rows = choice.rows;
  return std::vector<Tensor>{row_offsets, columns, column_offsets, rows};
}

absl::StatusOr<Tensor> OwnBlocks(const ShardLayout& queries, int32_t heads, int32_t tile,
                                 int32_t block_size, const Tensor& like) {
  const int64_t tiles = (queries.local_tokens() + tile - 1) / tile,
                blocks = (queries.tokens + block_size - 1) / block_size;
  Tensor chosen = torch::empty({heads, tiles, BlockWords(static_cast<int32_t>(blocks))},
                               like.options().dtype(torch::kInt));
  RETURN_IF_ERROR(index::ChooseOwnBlocks(
      queries, heads, tile, block_size,
      reinterpret_cast<uint32_t*>(chosen.mutable_data_ptr<int32_t>()), Stream()));
  return chosen;
}

absl::StatusOr<QueryRows> QueryRows::List(const TileSelection& tiles, const ShardLayout& queries,
                                          const ShardLayout& keys, int32_t heads,
                                          const QueryRowsPlan& plan, const Tensor& like) {
  QueryRows rows({.chosen = tiles.choice.chosen,
                  .query_layout = queries,
                  .key_layout = keys,
                  .heads = heads,
                  .tile = tiles.tile,
                  .block_size = tiles.choice.block_size,
                  .capacity = plan.capacity},
                 tiles.document_starts, plan, torch::TensorOptions().device(like.device()));
  index::QueryRowsArgs& lists = rows.lists_;
  const auto allocate = [&](const std::vector<int64_t>& sizes) {
    rows.memory_.push_back(torch::empty(sizes, rows.device_.dtype(torch::kInt)));
    return rows.memory_.back().mutable_data_ptr<int32_t>();
  };
  lists.before = allocate({heads, lists.blocks(), QueryWords(queries.local_tokens())});
  lists.counts = allocate({heads, lists.blocks()});
  lists.first_rows = allocate({heads, lists.blocks() + 1});
  lists.row_offsets = allocate({heads, lists.tiles() + 1});
  lists.columns = allocate({heads, lists.entries()});
  lists.column_offsets = allocate({heads, lists.key_tiles() + 1});
  lists.rows = allocate({heads, lists.entries()});
  RETURN_IF_ERROR(index::ListQueryRows(lists, Stream()));
  return rows;
}

absl::Status QueryRows::Attend(const AttentionForwardArgs<__nv_bfloat16>& args) const {
  const GatheredRows gathered(plan_, {.q = args.q, .document_starts = document_starts_}, device_);
  const Tensor out = gathered.NewSums();
  for (int32_t head = 0; head < lists_.heads; head += plan_.heads) {
    const index::HeadRange range = {.first = head, .count = plan_.heads};
    RETURN_IF_ERROR(gathered.Gather(lists_, range));
    const int32_t kv_head = head / (lists_.heads / args.k.heads);
    RETURN_IF_ERROR(CallWithWorkspace(
        AttentionForwardArgs<__nv_bfloat16>{
            .q = gathered.q(),
            .k = HeadOf(args.k, kv_head),
            .v = HeadOf(args.v, kv_head),
            .out = SumView(out),
            .lse = gathered.lse(),
            .query_layout = BehindAllKeys(plan_.capacity, lists_.key_layout.tokens),
            .key_layout = lists_.key_layout,
            .tiles = TilesOfRows(lists_, head, gathered.starts()),
            .scale = args.scale},
        gathered.like(), sm90::ForwardWorkspaceBytes, sm90::AttentionForward));
    RETURN_IF_ERROR(index::MergeQueryRows(lists_, range, out.const_data_ptr<float>(),
                                          gathered.lse(), args.out, args.lse, Stream()));
  }
  return absl::OkStatus();
}

absl::Status QueryRows::AttendBackward(const AttentionBackwardArgs<__nv_bfloat16>& args) const {
  const GatheredRows gathered(plan_,
                              {.q = args.q,
                               .d_out = args.d_out,
                               .lse = args.lse,
                               .delta = args.delta,
                               .document_starts = document_starts_},
                              device_);
  const Tensor dq = gathered.NewSums();
  for (int32_t head = 0; head < lists_.heads; head += plan_.heads) {
    const index::HeadRange range = {.first = head, .count = plan_.heads};
    RETURN_IF_ERROR(gathered.Gather(lists_, range));
    dq.zero_();
    const int32_t kv_head = head / (lists_.heads / args.k.heads);
    RETURN_IF_ERROR(CallWithWorkspace(
        AttentionBackwardArgs<__nv_bfloat16>{
            .q = gathered.q(),
            .k = HeadOf(args.k, kv_head),
            .v = HeadOf(args.v, kv_head),
            .d_out = gathered.d_out(),
            .lse = gathered.lse(),
            .delta = gathered.delta(),
            .dq = SumView(dq),
            .dk = HeadOf(args.dk, kv_head),
            .dv = HeadOf(args.dv, kv_head),
            .query_layout = BehindAllKeys(plan_.capacity, lists_.key_layout.tokens),
            .key_layout = lists_.key_layout,
            .tiles = TilesOfRows(lists_, head, gathered.starts()),
            .scale = args.scale,
            .deterministic = args.deterministic},
        dq, sm90::BackwardWorkspaceBytes, sm90::AttentionBackward));
    RETURN_IF_ERROR(
        index::AddQueryRows(lists_, range, dq.const_data_ptr<float>(), args.dq, Stream()));
  }
  return absl::OkStatus();
}

absl::Status QueryRows::CountTiles(int64_t* tiles) const {
  return index::CountQueryRowTiles(lists_, tiles, Stream());
}

}  // namespace ringleader::kernels::ops
