#include "worker/attention/cuda/cuda_attention_call.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "base/status_macros.h"
#include "kernels/fused/rows/attention_rows.h"
#include "kernels/index/between_ranks.h"
#include "kernels/index/groups/group_lists.h"
#include "kernels/ops/cast_ops.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/sm90/attention.h"
#include "kernels/sm90/columns.h"

namespace ringleader::attention {

namespace fused = kernels::fused;
namespace sm90 = kernels::sm90;
using kernels::TokenMajor;
using kernels::ops::CallWithWorkspace;
using kernels::ops::FloatView;
using kernels::ops::MutableBf16;
using kernels::ops::Stream;
using kernels::ops::View;
using torch::Tensor;

namespace {

template <typename T>
TokenMajor<T> DenseView(T* data, int64_t tokens, int32_t heads, int32_t head_dim) {
  return {data, tokens, heads, head_dim, int64_t{heads} * head_dim, head_dim};
}

// [queries, ...] as rows, with `padding` behind each tile's.
Tensor Spread(const kernels::SpreadRows& tiles, const Tensor& queries, float padding) {
  const int64_t count = queries.size(0), whole = count / tiles.tile;
  std::vector<int64_t> sizes = queries.sizes().vec();
  sizes[0] = tiles.Rows(count);
  Tensor rows = torch::full(sizes, padding, queries.options());
  const Tensor to = rows.unflatten(0, {-1, kernels::kGroupTile}).narrow(1, 0, tiles.tile);
  const int64_t held = whole * tiles.tile;
  to.narrow(0, 0, whole).copy_(queries.narrow(0, 0, held).unflatten(0, {whole, tiles.tile}));
  if (held < count) {
    to[whole].narrow(0, 0, count - held).copy_(queries.narrow(0, held, count - held));
  }
  return rows;
}

// The `count` queries of rows.
Tensor Queries(const kernels::SpreadRows& tiles, const Tensor& rows, int64_t count) {
  return rows.unflatten(0, {-1, kernels::kGroupTile})
      .narrow(1, 0, tiles.tile)
      .flatten(0, 1)
      .narrow(0, 0, count);
}

const __nv_bfloat16* Bf16(const DeviceArray<std::byte>& array) {
  return reinterpret_cast<const __nv_bfloat16*>(array.data());
}

}  // namespace

absl::StatusOr<CudaCall::HopTiles> CudaCall::TilesOf(const Step& step) const {
  const LayerIndex& index = step.index;
  if (index.pattern != kernels::TilePattern::kCsr) return HopTiles{.tiles = index.Tiles()};
  return ListTiles(step, index.chosen.data(), index.kept_blocks);
}

absl::StatusOr<CudaCall::HopTiles> CudaCall::ListTiles(const Step& step, const uint32_t* chosen,
                                                       int64_t kept_blocks) const {
  HopTiles hop{.tiles = step.index.Tiles()};
  ASSIGN_OR_RETURN(hop.lists, kernels::ops::ListTiles({.chosen = chosen,
                                                       .query_layout = step.mine,
                                                       .key_layout = step.owner,
                                                       .seen = step.index.seen(),
                                                       .heads = shape().heads,
                                                       .tile = step.index.tile,
                                                       .block_size = step.index.block_size},
                                                      kept_blocks, tensors_.q, &hop.tiles));
  return hop;
}

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
    ASSIGN_OR_RETURN(own_blocks_, kernels::ops::OwnBlocks(step.mine, shape().heads, step.index.tile,
                                                          step.index.block_size, tensors_.q));
  }
  ASSIGN_OR_RETURN(
      HopTiles hop,
      ListTiles(step, reinterpret_cast<const uint32_t*>(own_blocks_.const_data_ptr<int32_t>()),
                /*kept_blocks=*/1));
  hop.tiles.choice = {};  // all queries of a tile are of one block
  return hop;
}

absl::StatusOr<kernels::ops::QueryRows> CudaCall::RowsOf(const Step& step,
                                                         const kernels::QueryRowsPlan& plan) const {
  return kernels::ops::QueryRows::List(step.index.Tiles(), step.mine, step.owner, shape().heads,
                                       plan, tensors_.q);
}

CallShape CudaCall::shape() const {
  return {.tokens = tensors_.q.size(0),
          .heads = static_cast<int32_t>(tensors_.q.size(1)),
          .kv_heads = static_cast<int32_t>(tensors_.k.size(1)),
          .head_dim = static_cast<int32_t>(tensors_.q.size(2))};
}

absl::StatusOr<std::unique_ptr<RingSlots>> CudaCall::PlaceKv(const ring::RingSchedule& schedule,
                                                             int64_t slot_tokens) {
  std::unique_ptr<DeviceSlots> slots = device_.KvSlots(schedule, slot_tokens, kv_row());
  if (schedule.ranks == 1) return slots;
  void* const own = slots->memory(Gathers(schedule) ? schedule.rank : 0);
  RETURN_IF_ERROR(fused::PackKv(View(tensors_.k), View(tensors_.v),
                                static_cast<__nv_bfloat16*>(own), Stream()));
  if (Gathers(schedule)) RETURN_IF_ERROR(slots->StartAllGather());
  return slots;
}

TokenMajor<const __nv_bfloat16> CudaCall::KeysOf(const Step& step, int part) const {
  if (step.slot == nullptr) return View(part == 0 ? tensors_.k : tensors_.v);
  const CallShape of = shape();
  return DenseView(static_cast<const __nv_bfloat16*>(step.slot) + part * of.kv_elements(step.keys),
                   step.keys, of.kv_heads, of.head_dim);
}

absl::Status CudaCall::StartOutput() {
  const auto floats = tensors_.q.options().dtype(torch::kFloat);
  sums_ = torch::empty(tensors_.q.sizes(), floats);
  tensors_.lse =
      torch::full({shape().heads, shape().tokens}, -std::numeric_limits<float>::infinity(), floats);
  return absl::OkStatus();
}

absl::Status CudaCall::GatherColumns(const Step& step) {
  return sm90::GatherColumns(
      KeysOf(step, 0), KeysOf(step, 1), step.owner, step.index.Columns(), shape().heads,
      reinterpret_cast<__nv_bfloat16*>(step.index.column_keys.data()),
      reinterpret_cast<__nv_bfloat16*>(step.index.column_values.data()), Stream());
}

absl::StatusOr<kernels::KeyGroups> CudaCall::GroupsOf(const Step& step) {
  if (!step.index.has_groups()) return kernels::KeyGroups{};
  if (group_lists_.groups == nullptr) {
    const kernels::ChosenGroups chosen = step.index.Groups();
    const int64_t rows =
        shape().heads / chosen.heads_together * step.index.group_tiles.Tiles(shape().tokens);
    const auto ints = tensors_.q.options().dtype(torch::kInt);
    groups_ = torch::empty({rows, step.index.most_groups}, ints);
    group_bounds_ = torch::empty({step.mine.ranks + 1, rows}, ints);
    group_lists_ = {groups_.mutable_data_ptr<int32_t>(), group_bounds_.mutable_data_ptr<int32_t>(),
                    rows, step.index.most_groups, chosen.heads_together};
    RETURN_IF_ERROR(
        kernels::index::ListGroups(chosen, step.mine, shape().heads, group_lists_, Stream()));
  }
  return group_lists_.Of(step.owner);
}

absl::Status CudaCall::Attend(const Step& step) {
  const std::optional<kernels::QueryRowsPlan> plan = RowsPlanOf(step.index);
  if (plan.has_value()) return AttendChosen(step, *plan);
  if (step.index.group_tiles.is_spread()) return AttendSpread(step);
  ASSIGN_OR_RETURN(HopTiles hop, TilesOf(step));
  ASSIGN_OR_RETURN(hop.tiles.groups, GroupsOf(step));
  return AttendTiles(step, hop.tiles);
}

absl::Status CudaCall::AttendChosen(const Step& step, const kernels::QueryRowsPlan& plan) {
  ASSIGN_OR_RETURN(const HopTiles own, OwnBlocksOf(step));
  RETURN_IF_ERROR(AttendTiles(step, own.tiles));
  ASSIGN_OR_RETURN(const kernels::ops::QueryRows rows, RowsOf(step, plan));
  RETURN_IF_ERROR(rows.Attend(ForwardArgs(step, {})));
  return rows.CountTiles(device_.stats().SlotsOf(layer_).owner_tiles + step.owner.rank);
}

void CudaCall::TakeSpread(const kernels::SpreadRows& tiles) {
  const bool is_backward = tensors_.d_out.defined();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  rows_ = {.tiles = tiles, .q = Spread(tiles, tensors_.q, 0.0f)};
  const auto floats = tensors_.q.options().dtype(torch::kFloat);
  rows_->sums = torch::zeros(rows_->q.sizes(), floats);
  if (!is_backward) {
    rows_->lse = torch::full({shape().heads, rows_->q.size(0)}, -kInfinity, floats);
    return;
  }
  // Weights of padding are exponentials of minus infinity.
  rows_->lse = Spread(tiles, tensors_.lse.t(), kInfinity).t().contiguous();
  rows_->delta = Spread(tiles, delta_.t(), 0.0f).t().contiguous();
  rows_->d_out = Spread(tiles, tensors_.d_out, 0.0f);
}

absl::Status CudaCall::AttendSpread(const Step& step) {
  const kernels::SpreadRows& tiles = step.index.group_tiles;
  if (step.owner.rank == step.mine.rank) {
    RETURN_IF_ERROR(CallWithWorkspace(ForwardArgs(step, step.index.OwnTiles()), tensors_.q,
                                      sm90::ForwardWorkspaceBytes, sm90::AttentionForward));
    device_.StatsOf(layer_).tiles_per_ring_step[step.number] +=
        shape().heads * tiles.OwnTiles(shape().tokens);
  }
  if (!rows_.has_value()) TakeSpread(tiles);
  ASSIGN_OR_RETURN(const kernels::KeyGroups groups, GroupsOf(step));
  kernels::AttentionForwardArgs<__nv_bfloat16> args =
      ForwardArgs(step, step.index.RowTiles(groups));
  args.q = View(rows_->q);
  args.out = FloatView(rows_->sums);
  args.lse = rows_->lse.mutable_data_ptr<float>();
  args.query_layout = tiles.LayoutOf(step.mine);
  RETURN_IF_ERROR(
      CallWithWorkspace(args, tensors_.q, sm90::ForwardWorkspaceBytes, sm90::AttentionForward));
  return kernels::index::CountGroups(groups, tiles, step.mine, group_lists_.rows,
                                     device_.stats().SlotsOf(layer_).owner_tiles + step.owner.rank,
                                     Stream());
}

absl::Status CudaCall::AttendSpreadBackward(const Step& step, void* slot) {
  const kernels::SpreadRows& tiles = step.index.group_tiles;
  if (step.owner.rank == step.mine.rank) {
    RETURN_IF_ERROR(AttendTilesBackward(step, step.index.OwnTiles(), slot));
  }
  if (!rows_.has_value()) TakeSpread(tiles);
  ASSIGN_OR_RETURN(const kernels::KeyGroups groups, GroupsOf(step));
  kernels::AttentionBackwardArgs<__nv_bfloat16> args =
      BackwardArgs(step, step.index.RowTiles(groups), slot);
  args.q = View(rows_->q);
  args.d_out = View(rows_->d_out);
  args.lse = rows_->lse.const_data_ptr<float>();
  args.delta = rows_->delta.const_data_ptr<float>();
  args.dq = FloatView(rows_->sums);
  args.query_layout = tiles.LayoutOf(step.mine);
  return CallWithWorkspace(args, dq_sums_, sm90::BackwardWorkspaceBytes, sm90::AttentionBackward);
}

absl::Status CudaCall::AttendTiles(const Step& step, const kernels::TileSelection& tiles) {
  RETURN_IF_ERROR(CallWithWorkspace(ForwardArgs(step, tiles), tensors_.q,
                                    sm90::ForwardWorkspaceBytes, sm90::AttentionForward));
  return CountTiles(step, tiles);
}

kernels::AttentionForwardArgs<__nv_bfloat16> CudaCall::ForwardArgs(
    const Step& step, const kernels::TileSelection& tiles) const {
  return {.q = View(tensors_.q),
          .k = KeysOf(step, 0),
          .v = KeysOf(step, 1),
          .out = FloatView(sums_),
          .lse = tensors_.lse.mutable_data_ptr<float>(),
          .query_layout = step.mine,
          .key_layout = step.owner,
          .tiles = tiles,
          .scale = shape().scale()};
}

absl::Status CudaCall::CountTiles(const Step& step, const kernels::TileSelection& tiles) {
  const int64_t query_tiles = (shape().tokens + step.index.tile - 1) / step.index.tile;
  switch (tiles.pattern) {
    case kernels::TilePattern::kToeplitz:
      if (tiles.groups.groups == nullptr) return absl::OkStatus();  // counted with the selection
      if (step.owner.rank == step.mine.rank) {
        device_.StatsOf(layer_).tiles_per_ring_step[step.number] += shape().heads * query_tiles;
      }
      return kernels::index::CountGroups(
          tiles.groups, step.index.group_tiles, step.mine, group_lists_.rows,
          device_.stats().SlotsOf(layer_).owner_tiles + step.owner.rank, Stream());
    case kernels::TilePattern::kCsr:
      return kernels::index::CountListed(
          tiles.row_offsets, shape().heads * (query_tiles + 1),
          device_.stats().SlotsOf(layer_).owner_tiles + step.owner.rank, Stream());
    case kernels::TilePattern::kFull:
    case kernels::TilePattern::kCausal:
    case kernels::TilePattern::kWindow:
      break;
  }
  device_.StatsOf(layer_).tiles_per_ring_step[step.number] +=
      device_.BandTilesOf(step.index, {step.mine, shape().tokens}, {step.owner, step.keys}) *
      shape().heads;
  return absl::OkStatus();
}

absl::Status CudaCall::AttendColumns(const Step& own) {
  return CallWithWorkspace(sm90::ColumnForwardArgs{.q = View(tensors_.q),
                                                   .keys = Bf16(own.index.column_keys),
                                                   .values = Bf16(own.index.column_values),
                                                   .columns = own.index.Columns(),
                                                   .tiles = own.index.Tiles(),
                                                   .query_layout = own.mine,
                                                   .out = FloatView(sums_),
                                                   .lse = tensors_.lse.mutable_data_ptr<float>(),
                                                   .scale = shape().scale()},
                           tensors_.q, sm90::ColumnForwardWorkspaceBytes, sm90::ColumnForward);
}

absl::Status CudaCall::FinishOutput() {
  if (rows_.has_value()) {
    // Every query sees itself, so that its own tile's logarithm is a number.
    const Tensor own = tensors_.lse.t(),
                 of_groups = Queries(rows_->tiles, rows_->lse.t(), shape().tokens),
                 all = torch::logaddexp(own, of_groups);
    sums_.mul_((own - all).exp_().unsqueeze(-1))
        .addcmul_(Queries(rows_->tiles, rows_->sums, shape().tokens),
                  (of_groups - all).exp_().unsqueeze(-1));
    tensors_.lse = all.t().contiguous();
    rows_.reset();
  }
  tensors_.out = torch::empty(tensors_.q.sizes(), tensors_.q.options());
  kernels::ops::CastTensors cast;
  const int64_t width = int64_t{shape().heads} * shape().head_dim;
  if (tensors_.cast.is_wanted && width <= fused::kMaxCastDim) {
    cast = kernels::ops::EmptyCast(shape().tokens, width, tensors_.q);
    tensors_.cast.codes = cast.codes;
    tensors_.cast.scales = cast.scales;
  }
  return fused::FinishOutput(
      DenseView(sums_.const_data_ptr<float>(), shape().tokens, shape().heads, shape().head_dim),
      tensors_.lse.const_data_ptr<float>(), MutableBf16(tensors_.out), kernels::ops::View(cast),
      Stream());
}

TokenMajor<float> CudaCall::GradientsIn(void* slot, int64_t keys, int part) const {
  return DenseView(static_cast<float*>(slot) + part * shape().kv_elements(keys), keys,
                   shape().kv_heads, shape().head_dim);
}

absl::StatusOr<std::unique_ptr<RingSlots>> CudaCall::PlaceGradients(
    const ring::RingSchedule& schedule, int64_t slot_tokens) {
  return device_.GradientSlots(schedule, slot_tokens, kv_row());
}

absl::Status CudaCall::StartGradients() {
  dq_sums_ = torch::zeros({shape().tokens, shape().heads, shape().head_dim},
                          tensors_.q.options().dtype(torch::kFloat));
  delta_ = torch::empty_like(tensors_.lse);
  return fused::RowDelta(View(tensors_.d_out), View(tensors_.out), delta_.mutable_data_ptr<float>(),
                         Stream());
}

absl::Status CudaCall::ColumnsBackward(const Step& own) {
  d_columns_ =
      torch::zeros({2, shape().heads, own.index.max_columns, shape().head_dim}, dq_sums_.options());
  return CallWithWorkspace(
      sm90::ColumnBackwardArgs{.q = View(tensors_.q),
                               .d_out = View(tensors_.d_out),
                               .keys = Bf16(own.index.column_keys),
                               .values = Bf16(own.index.column_values),
                               .columns = own.index.Columns(),
                               .tiles = own.index.Tiles(),
                               .query_layout = own.mine,
                               .lse = tensors_.lse.const_data_ptr<float>(),
                               .delta = delta_.const_data_ptr<float>(),
                               .dq = FloatView(dq_sums_),
                               .d_keys = d_columns_[0].mutable_data_ptr<float>(),
                               .d_values = d_columns_[1].mutable_data_ptr<float>(),
                               .scale = shape().scale(),
                               .deterministic = device_.options().deterministic},
      dq_sums_, sm90::ColumnBackwardWorkspaceBytes, sm90::ColumnBackward);
}

absl::Status CudaCall::AttendBackward(const Step& step, void* slot) {
  const std::optional<kernels::QueryRowsPlan> plan = RowsPlanOf(step.index);
  if (plan.has_value()) {
    ASSIGN_OR_RETURN(const HopTiles own, OwnBlocksOf(step));
    RETURN_IF_ERROR(AttendTilesBackward(step, own.tiles, slot));
    ASSIGN_OR_RETURN(const kernels::ops::QueryRows rows, RowsOf(step, *plan));
    return rows.AttendBackward(BackwardArgs(step, {}, slot));
  }
  if (step.index.group_tiles.is_spread()) return AttendSpreadBackward(step, slot);
  ASSIGN_OR_RETURN(HopTiles hop, TilesOf(step));
  ASSIGN_OR_RETURN(hop.tiles.groups, GroupsOf(step));
  return AttendTilesBackward(step, hop.tiles, slot);
}

absl::Status CudaCall::AttendTilesBackward(const Step& step, const kernels::TileSelection& tiles,
                                           void* slot) {
  return CallWithWorkspace(BackwardArgs(step, tiles, slot), dq_sums_, sm90::BackwardWorkspaceBytes,
                           sm90::AttentionBackward);
}

kernels::AttentionBackwardArgs<__nv_bfloat16> CudaCall::BackwardArgs(
    const Step& step, const kernels::TileSelection& tiles, void* slot) const {
  return {.q = View(tensors_.q),
          .k = KeysOf(step, 0),
          .v = KeysOf(step, 1),
          .d_out = View(tensors_.d_out),
          .lse = tensors_.lse.const_data_ptr<float>(),
          .delta = delta_.const_data_ptr<float>(),
          .dq = FloatView(dq_sums_),
          .dk = GradientsIn(slot, step.keys, 0),
          .dv = GradientsIn(slot, step.keys, 1),
          .query_layout = step.mine,
          .key_layout = step.owner,
          .tiles = tiles,
          .scale = shape().scale(),
          .deterministic = device_.options().deterministic};
}

absl::Status CudaCall::ScatterColumns(const Step& step, void* slot) {
  return sm90::ScatterColumns(d_columns_[0].const_data_ptr<float>(),
                              d_columns_[1].const_data_ptr<float>(), step.owner,
                              step.index.Columns(), shape().heads, GradientsIn(slot, step.keys, 0),
                              GradientsIn(slot, step.keys, 1), Stream());
}

absl::Status CudaCall::FinishQueries() {
  if (rows_.has_value()) dq_sums_.add_(Queries(rows_->tiles, rows_->sums, shape().tokens));
  rows_.reset();  // what follows may have their memory
  delta_.reset();
  d_columns_.reset();
  tensors_.gradients.dq = torch::empty(dq_sums_.sizes(), tensors_.q.options());
  return fused::RoundToBf16(dq_sums_.const_data_ptr<float>(), MutableBf16(tensors_.gradients.dq),
                            tensors_.gradients.dq.numel(), Stream());
}

absl::Status CudaCall::ReturnGradients(const ring::RingSchedule& schedule, int64_t slot_tokens,
                                       RingSlots& slots) {
  const Tensor dkv =
      torch::empty({2, shape().tokens, shape().kv_heads, shape().head_dim}, tensors_.q.options());
  tensors_.gradients.dk = dkv[0];
  tensors_.gradients.dv = dkv[1];
  auto* const sums = static_cast<float*>(slots.memory(schedule.home_grad_slot));
  const int64_t elements = dkv.numel(), slot_elements = 2 * shape().kv_elements(slot_tokens);
  const auto sum_over_ranks = [&](const void* data, void* receive, comm::ElementType type) {
    return AwaitTransfer(device_.communicator().ReduceScatterSum(
                             comm::Channel::kGradKv, data, slot_elements, receive, type, Stream()),
                         device_.stats().timers(), Stream());
  };
  if (Gathers(schedule) && device_.options().bf16_gradients) {
    const Tensor rounded = torch::empty({schedule.ranks, slot_elements}, dkv.options());
    RETURN_IF_ERROR(fused::RoundToBf16(static_cast<const float*>(slots.memory(0)),
                                       MutableBf16(rounded), rounded.numel(), Stream()));
    if (slot_elements == elements) {
      return sum_over_ranks(rounded.const_data_ptr(), dkv.mutable_data_ptr(),
                            comm::ElementType::kBfloat16);
    }
    const Tensor sum = rounded[schedule.rank];  // in its place
    RETURN_IF_ERROR(sum_over_ranks(rounded.const_data_ptr(), sum.mutable_data_ptr(),
                                   comm::ElementType::kBfloat16));
    dkv.view({-1}).copy_(sum.narrow(0, 0, elements), /*non_blocking=*/true);
    return absl::OkStatus();
  }
  if (Gathers(schedule)) {
    RETURN_IF_ERROR(sum_over_ranks(slots.memory(0), sums, comm::ElementType::kFloat32));
  }
  return fused::RoundToBf16(sums, MutableBf16(dkv), elements, Stream());
}

}  // namespace ringleader::attention
