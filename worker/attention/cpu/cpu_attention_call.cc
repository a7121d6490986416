#include "worker/attention/cpu/cpu_attention_call.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include "base/status_macros.h"
#include "kernels/reference/attention/attention.h"
#include "kernels/reference/attention/columns.h"
#include "kernels/reference/gates/block_gate.h"
#include "worker/attention/cpu/travelling_buffers.h"
#include "worker/attention/stats/stopwatch.h"

namespace ringleader::attention {

using kernels::ShardLayout;
using kernels::TokenMajor;
namespace reference = kernels::reference;

namespace {

// Part 0 of a slot: `tokens` keys, part 1: the values; or their gradients.
template <typename T>
TokenMajor<T> SlotPart(T* slot, int part, int64_t tokens, const TokenMajor<const float>& like) {
  const int64_t row = int64_t{like.heads} * like.head_dim;
  return {.data = slot + part * tokens * row,
          .tokens = tokens,
          .heads = like.heads,
          .head_dim = like.head_dim,
          .token_stride = row,
          .head_stride = like.head_dim};
}

size_t SlotFloats(const TokenMajor<const float>& k, int64_t tokens) {
  return 2 * tokens * k.heads * k.head_dim;
}

void CopyRows(const TokenMajor<const float>& from, const TokenMajor<float>& to) {
  for (int64_t i = 0; i < from.tokens; ++i) {
    for (int head = 0; head < from.heads; ++head) {
      std::memcpy(to.data + i * to.token_stride + head * to.head_stride,
                  from.data + i * from.token_stride + head * from.head_stride,
                  from.head_dim * sizeof(float));
    }
  }
}

// Dense rows of `like`'s heads.
template <typename T>
TokenMajor<T> DenseRows(T* data, int64_t rows, const TokenMajor<const float>& like) {
  const int64_t row = int64_t{like.heads} * like.head_dim;
  return {data, rows, like.heads, like.head_dim, row, like.head_dim};
}

// Queries as rows, zeros behind each tile's.
std::vector<float> Spread(const kernels::SpreadRows& tiles,
                          const TokenMajor<const float>& queries) {
  const int64_t width = int64_t{queries.heads} * queries.head_dim;
  std::vector<float> rows(tiles.Rows(queries.tokens) * width);
  for (int64_t i = 0; i < queries.tokens; ++i) {
    TokenMajor<const float> query = queries;
    query.data += i * query.token_stride;
    query.tokens = 1;
    CopyRows(query, DenseRows(rows.data() + tiles.RowOf(i) * width, 1, queries));
  }
  return rows;
}

// [heads, queries] as [heads, rows], with `padding`.
std::vector<float> SpreadNumbers(const kernels::SpreadRows& tiles, const float* numbers,
                                 int64_t heads, int64_t queries, float padding) {
  const int64_t rows = tiles.Rows(queries);
  std::vector<float> spread(heads * rows, padding);
  for (int64_t i = 0; i < heads * queries; ++i) {
    spread[i / queries * rows + tiles.RowOf(i % queries)] = numbers[i];
  }
  return spread;
}

const float* Floats(const DeviceArray<std::byte>& array) {
  return reinterpret_cast<const float*>(array.data());
}
float* MutableFloats(const DeviceArray<std::byte>& array) {
  return reinterpret_cast<float*>(array.data());
}

// The tiles of one hop and, of kCsr, the lists that they point into.
struct HopTiles {
  kernels::TileSelection tiles;
  reference::TileCsr lists;
};

HopTiles TilesOf(const LayerIndex& index, int heads, const ShardLayout& mine,
                 const ShardLayout& owner) {
  HopTiles hop{.tiles = index.Tiles(), .lists = {}};
  if (index.pattern != kernels::TilePattern::kCsr) return hop;
  const int64_t blocks = (mine.tokens + index.block_size - 1) / index.block_size;
  const int64_t words = (blocks + 31) / 32, rows = index.chosen.size / words;
  std::vector<char> selected(rows * blocks);
  for (int64_t i = 0; i < rows * blocks; ++i) {
    const int64_t row = i / blocks, block = i % blocks;
    selected[i] =
        static_cast<char>(index.chosen.data()[row * words + block / 32] >> block % 32 & 1);
  }
  hop.lists = reference::CsrOfBlocks(selected, heads, index.tile, index.block_size, mine, owner,
                                     index.seen());
  hop.tiles.row_offsets = hop.lists.row_offsets.data();
  hop.tiles.columns = hop.lists.columns.data();
  return hop;
}

template <typename T>
DeviceArray<T> Copy(const std::vector<T>& values) {
  auto copy = std::make_shared<std::vector<T>>(values);
  T* const data = copy->data();
  return {.memory = DeviceMemory(std::move(copy), data),
          .size = static_cast<int64_t>(values.size())};
}

}  // namespace

absl::Status CpuAttentionDevice::Begin(double AttentionSeconds::*phase) {
  phase_ = phase;
  phase_start_ = std::chrono::steady_clock::now();
  exposed_before_ = stats_.seconds.exposed_communication;
  return absl::OkStatus();
}

absl::Status CpuAttentionDevice::End() {
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - phase_start_;
  stats_.seconds.*phase_ +=
      spent.count() - (stats_.seconds.exposed_communication - exposed_before_);
  return absl::OkStatus();
}

LayerStats& CpuAttentionDevice::StatsOf(int layer) {
  if (layer >= static_cast<int>(stats_.layers.size())) stats_.layers.resize(layer + 1);
  return stats_.layers[layer];
}

void CpuAttentionDevice::MarkMicroBatch() {
  VisitedTiles now;
  for (const LayerStats& layer : stats_.layers) {
    now.visited += layer.TotalTiles();
    now.causal += layer.causal_tiles;
  }
  stats_.micro_batches.push_back({now.visited - marked_.visited, now.causal - marked_.causal});
  marked_ = now;
}

AttentionStats CpuAttentionDevice::TakeStats(const ring::RingSchedule& /*forward*/) {
  marked_ = {};
  AttentionStats stats = std::exchange(stats_, {});
  for (LayerStats& layer : stats.layers) layer.TakeMeans();
  return stats;
}

std::shared_ptr<const DeviceDocuments> CpuAttentionDevice::Upload(
    std::shared_ptr<const SequenceDocuments> documents, const patterns::EstimateQueries& queries) {
  return std::make_shared<DeviceDocuments>(
      DeviceDocuments{.host = documents,
                      .local_starts = Copy(documents->local_starts),
                      .key_starts = Copy(documents->key_starts),
                      .visible = Copy(documents->visible),
                      .visible_in_window = Copy(documents->visible_in_window),
                      .estimate_positions = Copy(queries.positions),
                      .estimate_starts = Copy(queries.starts),
                      .longest_without = queries.longest_without});
}

CallShape CpuCall::shape() const {
  return {.tokens = tensors_.q.tokens,
          .heads = tensors_.q.heads,
          .kv_heads = tensors_.k.heads,
          .head_dim = tensors_.q.head_dim};
}

absl::Status CpuCall::Silence(const DeviceArray<int64_t>& rows, float value) {
  if (rows.size == 0) return absl::OkStatus();
  const TokenMajor<const float>& q = tensors_.q;
  const int64_t width = int64_t{q.heads} * q.head_dim;
  choosing_.resize(q.tokens * width);
  CopyRows(q, DenseRows(choosing_.data(), q.tokens, q));
  for (const int64_t row : std::span(rows.data(), rows.size)) {
    std::fill_n(choosing_.data() + row * width, width, value);
  }
  return absl::OkStatus();
}

absl::Status CpuCall::LetSpeak() {
  choosing_ = {};
  return absl::OkStatus();
}

TokenMajor<const float> CpuCall::ChoosingQueries() const {
  if (choosing_.empty()) return tensors_.q;
  return DenseRows(choosing_.data(), tensors_.q.tokens, tensors_.q);
}

absl::StatusOr<std::unique_ptr<RingSlots>> CpuCall::PlaceKv(const ring::RingSchedule& schedule,
                                                            int64_t slot_tokens) {
  const TokenMajor<const float>& k = tensors_.k;
  const bool alone = schedule.ranks == 1;
  auto slots = std::make_unique<TravellingBuffers>(
      &device_.communicator(), alone ? 0 : schedule.kv_slots, SlotFloats(k, slot_tokens),
      slot_tokens, comm::Channel::kKvInner, comm::Channel::kKvOuter, device_.exposed_seconds());
  if (!alone) {
    float* const own = slots->data(Gathers(schedule) ? schedule.rank : 0);
    CopyRows(k, SlotPart(own, 0, k.tokens, k));
    CopyRows(tensors_.v, SlotPart(own, 1, k.tokens, k));
  }
  if (Gathers(schedule)) slots->StartAllGather();
  return slots;
}

TokenMajor<const float> CpuCall::KeysOf(const Step& step, int part) const {
  if (step.slot == nullptr) return part == 0 ? tensors_.k : tensors_.v;
  return SlotPart(static_cast<const float*>(step.slot), part, step.keys, tensors_.k);
}

TokenMajor<float> CpuCall::GradientsIn(void* slot, int64_t keys, int part) const {
  return SlotPart(static_cast<float*>(slot), part, keys, tensors_.k);
}

absl::Status CpuCall::GatherColumns(const Step& step) {
  reference::GatherColumns(KeysOf(step, 0), KeysOf(step, 1), step.owner, step.index.Columns(),
                           tensors_.q.heads, MutableFloats(step.index.column_keys),
                           MutableFloats(step.index.column_values));
  return absl::OkStatus();
}

kernels::KeyGroups CpuCall::GroupsOf(const Step& step) {
  if (!step.index.has_groups()) return {};
  if (groups_.lists.groups == nullptr) {
    groups_ = reference::ListGroups(step.index.Groups(), step.mine, tensors_.q.heads);
  }
  return groups_.lists.Of(step.owner);
}

kernels::AttentionForwardArgs<float> CpuCall::ForwardArgs(
    const Step& step, const kernels::TileSelection& tiles) const {
  return {.q = tensors_.q,
          .k = KeysOf(step, 0),
          .v = KeysOf(step, 1),
          .out = tensors_.out,
          .lse = tensors_.lse,
          .query_layout = step.mine,
          .key_layout = step.owner,
          .tiles = tiles,
          .scale = shape().scale()};
}

absl::Status CpuCall::AttendSpread(const Step& step) {
  const kernels::SpreadRows& tiles = step.index.group_tiles;
  const TokenMajor<const float>& q = tensors_.q;
  kernels::AttentionForwardArgs<float> args = ForwardArgs(step, step.index.OwnTiles());
  int64_t counted = 0;
  if (step.owner.rank == step.mine.rank) {
    RETURN_IF_ERROR(reference::AttentionForward(device_.engine(), args));
    counted = q.heads * tiles.OwnTiles(q.tokens);
  }
  const int64_t rows = tiles.Rows(q.tokens);
  if (!rows_.has_value()) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    rows_ = {.tiles = tiles, .q = Spread(tiles, q)};
    rows_->lse.assign(q.heads * rows, -kInfinity);
    rows_->sums.assign(rows_->q.size(), 0.0f);
  }
  args.q = DenseRows<const float>(rows_->q.data(), rows, q);
  args.out = DenseRows(rows_->sums.data(), rows, q);
  args.lse = rows_->lse.data();
  args.query_layout = tiles.LayoutOf(step.mine);
  const kernels::KeyGroups groups = GroupsOf(step);
  args.tiles = step.index.RowTiles(groups);
  RETURN_IF_ERROR(reference::AttentionForward(device_.engine(), args));
  for (int64_t row = 0; row < groups_.lists.rows; ++row) {
    counted += groups.heads_together * (tiles.TilesOfGroups(step.mine, row, groups.ends[row]) -
                                        tiles.TilesOfGroups(step.mine, row, groups.begins[row]));
  }
  device_.StatsOf(layer_).tiles_per_ring_step[step.number] += counted;
  return absl::OkStatus();
}

absl::Status CpuCall::FinishOutput() {
  if (!rows_.has_value()) return absl::OkStatus();
  const TokenMajor<float>& out = tensors_.out;
  const TokenMajor<float> sums =
      DenseRows(rows_->sums.data(), rows_->tiles.Rows(out.tokens), tensors_.q);
  for (int64_t i = 0; i < out.tokens; ++i) {
    const int64_t row = rows_->tiles.RowOf(i);
    for (int64_t head = 0; head < out.heads; ++head) {
      // Every query sees itself, so that its own tile's logarithm is a number.
      float& own = tensors_.lse[head * out.tokens + i];
      const float of_groups = rows_->lse[head * sums.tokens + row];
      const float top = std::max(own, of_groups),
                  all = top + std::log1p(std::exp(std::min(own, of_groups) - top)),
                  kept = std::exp(own - all), added = std::exp(of_groups - all);
      float* const to = out.data + i * out.token_stride + head * out.head_stride;
      const float* const from = sums.data + row * sums.token_stride + head * sums.head_stride;
      for (int x = 0; x < out.head_dim; ++x) to[x] = to[x] * kept + from[x] * added;
      own = all;
    }
  }
  rows_.reset();
  return absl::OkStatus();
}

absl::Status CpuCall::Attend(const Step& step) {
  if (step.index.group_tiles.is_spread()) return AttendSpread(step);
  HopTiles hop = TilesOf(step.index, tensors_.q.heads, step.mine, step.owner);
  hop.tiles.groups = GroupsOf(step);
  int64_t tiles = 0;
  RETURN_IF_ERROR(
      reference::AttentionForward(device_.engine(), ForwardArgs(step, hop.tiles), &tiles));
  device_.StatsOf(layer_).tiles_per_ring_step[step.number] += tiles;
  return absl::OkStatus();
}

absl::Status CpuCall::AttendColumns(const Step& own) {
  int64_t tiles = 0;
  RETURN_IF_ERROR(reference::ColumnForward(device_.engine(),
                                           {.q = tensors_.q,
                                            .keys = Floats(own.index.column_keys),
                                            .values = Floats(own.index.column_values),
                                            .columns = own.index.Columns(),
                                            .tiles = own.index.Tiles(),
                                            .query_layout = own.mine,
                                            .out = tensors_.out,
                                            .lse = tensors_.lse,
                                            .scale = shape().scale()},
                                           &tiles));
  device_.StatsOf(layer_).column_tiles += tiles;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<RingSlots>> CpuCall::PlaceGradients(
    const ring::RingSchedule& schedule, int64_t slot_tokens) {
  return std::make_unique<TravellingBuffers>(
      &device_.communicator(), schedule.grad_slots, SlotFloats(tensors_.k, slot_tokens),
      slot_tokens, comm::Channel::kGradKv, comm::Channel::kGradKv, device_.exposed_seconds());
}

absl::Status CpuCall::StartGradients() {
  delta_.resize(tensors_.q.heads * tensors_.q.tokens);
  const TokenMajor<float>& out = tensors_.out;
  reference::AttentionDelta(
      device_.engine(), tensors_.d_out,
      {out.data, out.tokens, out.heads, out.head_dim, out.token_stride, out.head_stride},
      delta_.data());
  return absl::OkStatus();
}

absl::Status CpuCall::ColumnsBackward(const Step& own) {
  d_column_keys_.assign(own.index.column_positions.size * tensors_.q.head_dim, 0.0f);
  d_column_values_ = d_column_keys_;
  return reference::ColumnBackward(device_.engine(), {.q = tensors_.q,
                                                      .d_out = tensors_.d_out,
                                                      .keys = Floats(own.index.column_keys),
                                                      .values = Floats(own.index.column_values),
                                                      .columns = own.index.Columns(),
                                                      .tiles = own.index.Tiles(),
                                                      .query_layout = own.mine,
                                                      .lse = tensors_.lse,
                                                      .delta = delta_.data(),
                                                      .dq = tensors_.dq,
                                                      .d_keys = d_column_keys_.data(),
                                                      .d_values = d_column_values_.data(),
                                                      .scale = shape().scale()});
}

kernels::AttentionBackwardArgs<float> CpuCall::BackwardArgs(const Step& step,
                                                            const kernels::TileSelection& tiles,
                                                            void* slot) const {
  return {.q = tensors_.q,
          .k = KeysOf(step, 0),
          .v = KeysOf(step, 1),
          .d_out = tensors_.d_out,
          .lse = tensors_.lse,
          .delta = delta_.data(),
          .dq = tensors_.dq,
          .dk = GradientsIn(slot, step.keys, 0),
          .dv = GradientsIn(slot, step.keys, 1),
          .query_layout = step.mine,
          .key_layout = step.owner,
          .tiles = tiles,
          .scale = shape().scale()};
}

absl::Status CpuCall::AttendSpreadBackward(const Step& step, void* slot) {
  const kernels::SpreadRows& tiles = step.index.group_tiles;
  const TokenMajor<const float>& q = tensors_.q;
  if (step.owner.rank == step.mine.rank) {
    RETURN_IF_ERROR(reference::AttentionBackward(device_.engine(),
                                                 BackwardArgs(step, step.index.OwnTiles(), slot)));
  }
  const int64_t rows = tiles.Rows(q.tokens);
  if (!rows_.has_value()) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    rows_ = {.tiles = tiles,
             .q = Spread(tiles, q),
             .d_out = Spread(tiles, tensors_.d_out),
             // Weights of padding are exponentials of minus infinity.
             .lse = SpreadNumbers(tiles, tensors_.lse, q.heads, q.tokens, kInfinity),
             .delta = SpreadNumbers(tiles, delta_.data(), q.heads, q.tokens, 0.0f)};
    rows_->sums.assign(rows_->q.size(), 0.0f);
  }
  kernels::AttentionBackwardArgs<float> args =
      BackwardArgs(step, step.index.RowTiles(GroupsOf(step)), slot);
  args.q = DenseRows<const float>(rows_->q.data(), rows, q);
  args.d_out = DenseRows<const float>(rows_->d_out.data(), rows, q);
  args.lse = rows_->lse.data();
  args.delta = rows_->delta.data();
  args.dq = DenseRows(rows_->sums.data(), rows, q);
  args.query_layout = tiles.LayoutOf(step.mine);
  return reference::AttentionBackward(device_.engine(), args);
}

absl::Status CpuCall::FinishQueries() {
  if (!rows_.has_value()) return absl::OkStatus();
  const TokenMajor<float>& dq = tensors_.dq;
  const TokenMajor<float> sums =
      DenseRows(rows_->sums.data(), rows_->tiles.Rows(dq.tokens), tensors_.q);
  for (int64_t i = 0; i < dq.tokens; ++i) {
    for (int64_t head = 0; head < dq.heads; ++head) {
      float* const to = dq.data + i * dq.token_stride + head * dq.head_stride;
      const float* const from =
          sums.data + rows_->tiles.RowOf(i) * sums.token_stride + head * sums.head_stride;
      for (int x = 0; x < dq.head_dim; ++x) to[x] += from[x];
    }
  }
  rows_.reset();
  return absl::OkStatus();
}

absl::Status CpuCall::AttendBackward(const Step& step, void* slot) {
  if (step.index.group_tiles.is_spread()) return AttendSpreadBackward(step, slot);
  HopTiles hop = TilesOf(step.index, tensors_.q.heads, step.mine, step.owner);
  hop.tiles.groups = GroupsOf(step);
  return reference::AttentionBackward(device_.engine(), BackwardArgs(step, hop.tiles, slot));
}

absl::Status CpuCall::ScatterColumns(const Step& step, void* slot) {
  reference::ScatterColumns(d_column_keys_.data(), d_column_values_.data(), step.owner,
                            step.index.Columns(), tensors_.q.heads, GradientsIn(slot, step.keys, 0),
                            GradientsIn(slot, step.keys, 1));
  return absl::OkStatus();
}

absl::Status CpuCall::ReturnGradients(const ring::RingSchedule& schedule, int64_t slot_tokens,
                                      RingSlots& slots) {
  const auto* home = static_cast<const float*>(slots.memory(schedule.home_grad_slot));
  std::vector<float> reduced;
  if (Gathers(schedule)) {
    const Stopwatch watch(device_.exposed_seconds());
    reduced.resize(SlotFloats(tensors_.k, slot_tokens));
    RETURN_IF_ERROR(device_.communicator().ReduceScatterSum(
        comm::Channel::kGradKv, static_cast<const float*>(slots.memory(0)), reduced.size(),
        reduced.data()));
    home = reduced.data();
  }
  const size_t floats = SlotFloats(tensors_.k, tensors_.k.tokens);
  std::copy_n(home, floats / 2, tensors_.dk.data);
  std::copy_n(home + floats / 2, floats / 2, tensors_.dv.data);
  return absl::OkStatus();
}

}  // namespace ringleader::attention
