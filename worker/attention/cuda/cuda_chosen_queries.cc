// Attention of queries that chose blocks each for itself, gathered by block.
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "kernels/index/rows/query_rows.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/sm90/attention.h"
#include "worker/attention/cuda/cuda_attention_call.h"

namespace ringleader::attention {

namespace index = kernels::index;
namespace sm90 = kernels::sm90;
using kernels::ShardLayout;
using kernels::TokenMajor;
using kernels::ops::CallWithWorkspace;
using kernels::ops::FloatView;
using kernels::ops::MutableBf16;
using kernels::ops::Stream;
using kernels::ops::View;
using torch::Tensor;

namespace {

// The rows of a step, and the memory of their lists.
struct StepRows {
  index::QueryRowsArgs lists;
  std::vector<Tensor> memory = {};
};

absl::StatusOr<StepRows> RowsOf(const Step& step, const kernels::QueryRowsPlan& plan, int32_t heads,
                                const torch::TensorOptions& device) {
  StepRows step_rows{.lists = {.chosen = step.index.queries_chosen.data(),
                               .query_layout = step.mine,
                               .key_layout = step.owner,
                               .heads = heads,
                               .tile = step.index.tile,
                               .block_size = step.index.block_size,
                               .capacity = plan.capacity}};
  index::QueryRowsArgs& lists = step_rows.lists;
  const auto allocate = [&](const std::vector<int64_t>& sizes) {
    step_rows.memory.push_back(torch::empty(sizes, device.dtype(torch::kInt)));
    return step_rows.memory.back().mutable_data_ptr<int32_t>();
  };
  lists.before = allocate({heads, lists.blocks(), kernels::QueryWords(step.mine.local_tokens())});
  lists.counts = allocate({heads, lists.blocks()});
  lists.first_rows = allocate({heads, lists.blocks() + 1});
  lists.row_offsets = allocate({heads, lists.tiles() + 1});
  lists.columns = allocate({heads, lists.entries()});
  lists.column_offsets = allocate({heads, lists.key_tiles() + 1});
  lists.rows = allocate({heads, lists.entries()});
  RETURN_IF_ERROR(index::ListQueryRows(lists, Stream()));
  return step_rows;
}

// Where rows lie for the kernels' causal mask: all of their keys come before them.
ShardLayout BehindAllKeys(int64_t rows, int64_t tokens) {
  const auto parts = static_cast<int32_t>(tokens / rows + 2);
  return {.ranks = parts, .rank = parts - 1, .tokens = parts * rows};
}

kernels::TileSelection TilesOfRows(const index::QueryRowsArgs& lists, int32_t first_head,
                                   const int32_t* starts) {
  return {.pattern = kernels::TilePattern::kCsr,
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
  return RowsView(kernels::ops::Bf16(rows), rows);
}
TokenMajor<float> SumView(const Tensor& rows) {
  return RowsView(rows.mutable_data_ptr<float>(), rows);
}

// The gathered rows of plan.heads heads, in memory that all heads use in turn.
class GatheredRows {
 public:
  // from: of all heads' queries, for backward with d_out; `like`: a tensor of their type.
  GatheredRows(const kernels::QueryRowsPlan& plan, const index::GatherQueriesArgs& from,
               const Tensor& like, int32_t head_dim)
      : args_(from),
        q_(torch::empty({plan.heads, plan.capacity, head_dim}, like.options())),
        lse_(torch::empty({plan.heads, plan.capacity}, like.options().dtype(torch::kFloat))) {
    args_.rows_q = MutableBf16(q_);
    args_.rows_lse = lse_.mutable_data_ptr<float>();
    if (from.d_out.data != nullptr) {
      d_out_ = torch::empty_like(q_);
      delta_ = torch::empty_like(lse_);
      args_.rows_d_out = MutableBf16(d_out_);
      args_.rows_delta = delta_.mutable_data_ptr<float>();
    }
    if (from.document_starts != nullptr) {
      starts_ = torch::empty({plan.capacity}, like.options().dtype(torch::kInt));
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

 private:
  index::GatherQueriesArgs args_;
  Tensor q_, lse_, d_out_, delta_, starts_;
};

}  // namespace

std::optional<kernels::QueryRowsPlan> CudaCall::RowsPlanOf(const LayerIndex& index) const {
  if (index.queries_chosen.size == 0) return std::nullopt;
  const int64_t blocks =
      index.queries_chosen.size / (shape().heads * kernels::QueryWords(shape().tokens));
  return kernels::PlanQueryRows(index.earlier_blocks, blocks, index.tile, index.block_size,
                                shape().heads, shape().kv_heads,
                                index.document_starts() != nullptr);
}

absl::StatusOr<CudaCall::HopTiles> CudaCall::OwnBlocksOf(const Step& step) {
  if (!own_blocks_.defined()) {
    own_blocks_ = torch::empty({step.index.chosen.size}, tensors_.q.options().dtype(torch::kInt));
    RETURN_IF_ERROR(index::ChooseOwnBlocks(
        step.mine, shape().heads, step.index.tile, step.index.block_size,
        reinterpret_cast<uint32_t*>(own_blocks_.mutable_data_ptr<int32_t>()), Stream()));
  }
  ASSIGN_OR_RETURN(
      HopTiles hop,
      ListTiles(step, reinterpret_cast<const uint32_t*>(own_blocks_.const_data_ptr<int32_t>()),
                /*kept_blocks=*/1));
  hop.tiles.choice = {};  // all queries of a tile are of one block
  return hop;
}

absl::Status CudaCall::AttendChosen(const Step& step, const kernels::QueryRowsPlan& plan) {
  ASSIGN_OR_RETURN(const HopTiles own, OwnBlocksOf(step));
  RETURN_IF_ERROR(AttendTiles(step, own.tiles));
  const CallShape of = shape();
  ASSIGN_OR_RETURN(const StepRows rows, RowsOf(step, plan, of.heads, tensors_.q.options()));
  const GatheredRows gathered(
      plan, {.q = View(tensors_.q), .document_starts = step.index.document_starts()}, tensors_.q,
      of.head_dim);
  const Tensor out = gathered.NewSums();
  for (int32_t head = 0; head < of.heads; head += plan.heads) {
    const index::HeadRange range = {.first = head, .count = plan.heads};
    RETURN_IF_ERROR(gathered.Gather(rows.lists, range));
    const int32_t kv_head = head / (of.heads / of.kv_heads);
    RETURN_IF_ERROR(CallWithWorkspace(
        kernels::AttentionForwardArgs<__nv_bfloat16>{
            .q = gathered.q(),
            .k = HeadOf(KeysOf(step, 0), kv_head),
            .v = HeadOf(KeysOf(step, 1), kv_head),
            .out = SumView(out),
            .lse = gathered.lse(),
            .query_layout = BehindAllKeys(plan.capacity, step.owner.tokens),
            .key_layout = step.owner,
            .tiles = TilesOfRows(rows.lists, head, gathered.starts()),
            .scale = of.scale()},
        tensors_.q, sm90::ForwardWorkspaceBytes, sm90::AttentionForward));
    RETURN_IF_ERROR(index::MergeQueryRows(rows.lists, range, out.const_data_ptr<float>(),
                                          gathered.lse(), FloatView(sums_),
                                          tensors_.lse.mutable_data_ptr<float>(), Stream()));
  }
  return index::CountQueryRowTiles(
      rows.lists, device_.stats().SlotsOf(layer_).owner_tiles + step.owner.rank, Stream());
}

absl::Status CudaCall::AttendChosenBackward(const Step& step, const kernels::QueryRowsPlan& plan,
                                            void* slot) {
  ASSIGN_OR_RETURN(const HopTiles own, OwnBlocksOf(step));
  RETURN_IF_ERROR(AttendTilesBackward(step, own.tiles, slot));
  const CallShape of = shape();
  ASSIGN_OR_RETURN(const StepRows rows, RowsOf(step, plan, of.heads, tensors_.q.options()));
  const GatheredRows gathered(plan,
                              {.q = View(tensors_.q),
                               .d_out = View(tensors_.d_out),
                               .lse = tensors_.lse.const_data_ptr<float>(),
                               .delta = delta_.const_data_ptr<float>(),
                               .document_starts = step.index.document_starts()},
                              tensors_.q, of.head_dim);
  const Tensor dq = gathered.NewSums();
  for (int32_t head = 0; head < of.heads; head += plan.heads) {
    const index::HeadRange range = {.first = head, .count = plan.heads};
    RETURN_IF_ERROR(gathered.Gather(rows.lists, range));
    dq.zero_();
    const int32_t kv_head = head / (of.heads / of.kv_heads);
    RETURN_IF_ERROR(CallWithWorkspace(
        kernels::AttentionBackwardArgs<__nv_bfloat16>{
            .q = gathered.q(),
            .k = HeadOf(KeysOf(step, 0), kv_head),
            .v = HeadOf(KeysOf(step, 1), kv_head),
            .d_out = gathered.d_out(),
            .lse = gathered.lse(),
            .delta = gathered.delta(),
            .dq = SumView(dq),
            .dk = HeadOf(GradientsIn(slot, step.keys, 0), kv_head),
            .dv = HeadOf(GradientsIn(slot, step.keys, 1), kv_head),
            .query_layout = BehindAllKeys(plan.capacity, step.owner.tokens),
            .key_layout = step.owner,
            .tiles = TilesOfRows(rows.lists, head, gathered.starts()),
            .scale = of.scale(),
            .deterministic = device_.options().deterministic},
        dq_sums_, sm90::BackwardWorkspaceBytes, sm90::AttentionBackward));
    RETURN_IF_ERROR(index::AddQueryRows(rows.lists, range, dq.const_data_ptr<float>(),
                                        FloatView(dq_sums_), Stream()));
  }
  return absl::OkStatus();
}

}  // namespace ringleader::attention
