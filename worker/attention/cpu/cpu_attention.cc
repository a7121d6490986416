#include "worker/attention/cpu/cpu_attention.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/status_macros.h"
#include "kernels/reference/attention/attention.h"
#include "kernels/reference/attention/columns.h"
#include "kernels/reference/tiles/block_topk.h"
#include "worker/attention/cpu/travelling_buffers.h"
#include "worker/attention/stats/stopwatch.h"

namespace ringleader::attention {

using kernels::ShardLayout;
using kernels::TokenMajor;
namespace reference = kernels::reference;

namespace {

// Part 0 of a slot: the keys, part 1: the values; or their gradients.
template <typename T>
TokenMajor<T> SlotPart(T* slot, int part, const TokenMajor<const float>& like) {
  const int64_t row = int64_t{like.heads} * like.head_dim;
  return {.data = slot + part * like.tokens * row,
          .tokens = like.tokens,
          .heads = like.heads,
          .head_dim = like.head_dim,
          .token_stride = row,
          .head_stride = like.head_dim};
}

size_t SlotFloats(const TokenMajor<const float>& k) {
  return 2 * k.tokens * k.heads * k.head_dim;
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

CallShape ShapeOf(const TokenMajor<const float>& q, const TokenMajor<const float>& k) {
  return {.tokens = q.tokens, .heads = q.heads, .kv_heads = k.heads, .head_dim = q.head_dim};
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
                                     index.document_starts());
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

AttentionStats CpuAttentionDevice::TakeStats(const ring::RingSchedule& /*forward*/) {
  AttentionStats stats = std::exchange(stats_, {});
  for (LayerStats& layer : stats.layers) layer.TakeMeans();
  return stats;
}

std::shared_ptr<const DeviceDocuments> CpuAttentionDevice::Upload(
    std::shared_ptr<const SequenceDocuments> documents, int estimate_queries) {
  const EstimateQueries estimate =
      ChooseEstimateQueries(documents->tokens, estimate_queries, documents.get());
  return std::make_shared<DeviceDocuments>(
      DeviceDocuments{.host = documents,
                      .local_starts = Copy(documents->local_starts),
                      .estimate_positions = Copy(estimate.positions),
                      .estimate_starts = Copy(estimate.starts)});
}

absl::StatusOr<std::unique_ptr<RingSlots>> CpuKeys::Place(const ring::RingSchedule& schedule) {
  const bool alone = schedule.ranks == 1;
  auto slots = std::make_unique<TravellingBuffers>(
      &device_.communicator(), alone ? 0 : schedule.kv_slots, SlotFloats(k_),
      comm::Channel::kKvInner, comm::Channel::kKvOuter, device_.exposed_seconds());
  if (!alone) {
    float* const own = slots->data(Gathers(schedule) ? schedule.rank : 0);
    CopyRows(k_, SlotPart(own, 0, k_));
    CopyRows(v_, SlotPart(own, 1, k_));
  }
  if (Gathers(schedule)) slots->StartAllGather();
  return slots;
}

TokenMajor<const float> CpuKeys::At(const StepKeys& keys, int part) const {
  if (keys.slot == nullptr) return part == 0 ? k_ : v_;
  return SlotPart(static_cast<const float*>(keys.slot), part, k_);
}

CpuForward::CpuForward(CpuAttentionDevice* device, const Tensors& tensors)
    : device_(*device), tensors_(tensors), keys_(device, tensors.k, tensors.v) {}

CallShape CpuForward::shape() const {
  return ShapeOf(tensors_.q, tensors_.k);
}

IndexDevice& CpuForward::ForIndex(int layer) {
  stats_ = &device_.StatsOf(layer);
  return index_device_.emplace(&device_.engine(), &device_.communicator(), tensors_.q, tensors_.k,
                               device_.exposed_seconds(), stats_);
}

absl::Status CpuForward::StartOutput(const LayerIndex& index, const ShardLayout& mine) {
  index_ = &index;
  mine_ = mine;
  return absl::OkStatus();
}

absl::Status CpuForward::GatherColumns(const StepKeys& keys) {
  reference::GatherColumns(keys_.At(keys, 0), keys_.At(keys, 1), keys.owner, index_->Columns(),
                           tensors_.q.heads, MutableFloats(index_->column_keys),
                           MutableFloats(index_->column_values));
  return absl::OkStatus();
}

absl::Status CpuForward::Attend(const StepKeys& keys) {
  const HopTiles hop = TilesOf(*index_, tensors_.q.heads, mine_, keys.owner);
  int64_t tiles = 0;
  RETURN_IF_ERROR(reference::AttentionForward(device_.engine(),
                                              {.q = tensors_.q,
                                               .k = keys_.At(keys, 0),
                                               .v = keys_.At(keys, 1),
                                               .out = tensors_.out,
                                               .lse = tensors_.lse,
                                               .query_layout = mine_,
                                               .key_layout = keys.owner,
                                               .tiles = hop.tiles,
                                               .scale = shape().scale()},
                                              &tiles));
  stats_->tiles_per_ring_step[keys.step] += tiles;
  return absl::OkStatus();
}

absl::Status CpuForward::AttendColumns() {
  int64_t tiles = 0;
  RETURN_IF_ERROR(reference::ColumnForward(device_.engine(),
                                           {.q = tensors_.q,
                                            .keys = Floats(index_->column_keys),
                                            .values = Floats(index_->column_values),
                                            .columns = index_->Columns(),
                                            .tiles = index_->Tiles(),
                                            .query_layout = mine_,
                                            .out = tensors_.out,
                                            .lse = tensors_.lse,
                                            .scale = shape().scale()},
                                           &tiles));
  stats_->column_tiles += tiles;
  return absl::OkStatus();
}

CpuBackward::CpuBackward(CpuAttentionDevice* device, const Tensors& tensors)
    : device_(*device), tensors_(tensors), keys_(device, tensors.k, tensors.v) {}

CallShape CpuBackward::shape() const {
  return ShapeOf(tensors_.q, tensors_.k);
}

absl::StatusOr<std::unique_ptr<RingSlots>> CpuBackward::PlaceGradients(
    const ring::RingSchedule& schedule) {
  return std::make_unique<TravellingBuffers>(&device_.communicator(), schedule.grad_slots,
                                             SlotFloats(tensors_.k), comm::Channel::kGradKv,
                                             comm::Channel::kGradKv, device_.exposed_seconds());
}

absl::Status CpuBackward::StartGradients(const LayerIndex& index, const ShardLayout& mine) {
  index_ = &index;
  mine_ = mine;
  delta_.resize(tensors_.q.heads * tensors_.q.tokens);
  reference::AttentionDelta(device_.engine(), tensors_.d_out, tensors_.out, delta_.data());
  return absl::OkStatus();
}

absl::Status CpuBackward::ColumnsBackward() {
  d_column_keys_.assign(index_->column_positions.size * tensors_.q.head_dim, 0.0f);
  d_column_values_ = d_column_keys_;
  return reference::ColumnBackward(device_.engine(), {.q = tensors_.q,
                                                      .d_out = tensors_.d_out,
                                                      .keys = Floats(index_->column_keys),
                                                      .values = Floats(index_->column_values),
                                                      .columns = index_->Columns(),
                                                      .tiles = index_->Tiles(),
                                                      .query_layout = mine_,
                                                      .lse = tensors_.lse,
                                                      .delta = delta_.data(),
                                                      .dq = tensors_.dq,
                                                      .d_keys = d_column_keys_.data(),
                                                      .d_values = d_column_values_.data(),
                                                      .scale = shape().scale()});
}

absl::Status CpuBackward::AttendBackward(const StepKeys& keys, void* slot) {
  const HopTiles hop = TilesOf(*index_, tensors_.q.heads, mine_, keys.owner);
  return reference::AttentionBackward(device_.engine(),
                                      {.q = tensors_.q,
                                       .k = keys_.At(keys, 0),
                                       .v = keys_.At(keys, 1),
                                       .d_out = tensors_.d_out,
                                       .lse = tensors_.lse,
                                       .delta = delta_.data(),
                                       .dq = tensors_.dq,
                                       .dk = SlotPart(static_cast<float*>(slot), 0, tensors_.k),
                                       .dv = SlotPart(static_cast<float*>(slot), 1, tensors_.k),
                                       .query_layout = mine_,
                                       .key_layout = keys.owner,
                                       .tiles = hop.tiles,
                                       .scale = shape().scale()});
}

absl::Status CpuBackward::ScatterColumns(const StepKeys& keys, void* slot) {
  reference::ScatterColumns(d_column_keys_.data(), d_column_values_.data(), keys.owner,
                            index_->Columns(), tensors_.q.heads,
                            SlotPart(static_cast<float*>(slot), 0, tensors_.k),
                            SlotPart(static_cast<float*>(slot), 1, tensors_.k));
  return absl::OkStatus();
}

absl::Status CpuBackward::ReturnGradients(const ring::RingSchedule& schedule,
                                          RingSlots& gradients) {
  const auto* home = static_cast<const float*>(gradients.memory(schedule.home_grad_slot));
  const size_t floats = SlotFloats(tensors_.k);
  std::vector<float> reduced;
  if (Gathers(schedule)) {
    const Stopwatch watch(device_.exposed_seconds());
    reduced.resize(floats);
    RETURN_IF_ERROR(device_.communicator().ReduceScatterSum(
        comm::Channel::kGradKv, static_cast<const float*>(gradients.memory(0)), floats,
        reduced.data()));
    home = reduced.data();
  }
  std::copy_n(home, floats / 2, tensors_.dk.data);
  std::copy_n(home + floats / 2, floats / 2, tensors_.dv.data);
  return absl::OkStatus();
}

}  // namespace ringleader::attention
