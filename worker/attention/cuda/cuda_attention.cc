#include "worker/attention/cuda/cuda_attention.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>

#include "base/status_macros.h"
#include "kernels/fused/attention_rows.h"
#include "kernels/index/between_ranks.h"
#include "kernels/index/blocks.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/sm90/attention.h"
#include "worker/attention/stats/tile_counts.h"

namespace ringleader::attention {

namespace fused = kernels::fused;
namespace sm90 = kernels::sm90;
using kernels::ShardLayout;
using kernels::TokenMajor;
using kernels::ops::FloatView;
using kernels::ops::MutableBf16;
using kernels::ops::Stream;
using kernels::ops::View;
using torch::Tensor;

namespace {

// Inside a node, between nodes. Sums between nodes go where nothing that an inner ring waits for
// queues before them.
constexpr std::array kKvChannels = {comm::Channel::kKvInner, comm::Channel::kKvOuter};
constexpr std::array kGradientChannels = {comm::Channel::kGradKv, comm::Channel::kKvOuter};

template <typename T>
TokenMajor<T> DenseView(T* data, int64_t tokens, int32_t heads, int32_t head_dim) {
  return {data, tokens, heads, head_dim, int64_t{heads} * head_dim, head_dim};
}

const __nv_bfloat16* Bf16(const DeviceArray<std::byte>& array) {
  return reinterpret_cast<const __nv_bfloat16*>(array.data());
}

CallShape ShapeOf(const Tensor& q, const Tensor& k) {
  return {.tokens = q.size(0),
          .heads = static_cast<int32_t>(q.size(1)),
          .kv_heads = static_cast<int32_t>(k.size(1)),
          .head_dim = static_cast<int32_t>(q.size(2))};
}

template <typename Args, typename Bytes, typename Run>
absl::Status CallWithWorkspace(const Args& args, const Tensor& like, Bytes bytes, Run run) {
  const int64_t needed = bytes(args);
  const Tensor scratch = kernels::ops::Scratch(needed, like);
  return run(args, sm90::Workspace{scratch.mutable_data_ptr(), needed}, Stream());
}

template <typename T>
DeviceArray<T> UploadArray(const std::vector<T>& values) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  Tensor pinned =
      torch::empty({bytes}, torch::TensorOptions().dtype(torch::kByte).pinned_memory(true));
  std::copy(values.begin(), values.end(), static_cast<T*>(pinned.mutable_data_ptr()));
  auto copy = std::make_shared<Tensor>(pinned.to(torch::kCUDA, /*non_blocking=*/true));
  void* const data = copy->mutable_data_ptr();
  return {.memory = DeviceMemory(std::move(copy), data),
          .size = static_cast<int64_t>(values.size())};
}

// The tiles of one hop and, of kCsr, the lists that they point into.
struct HopTiles {
  kernels::TileSelection tiles;
  std::vector<Tensor> lists = {};
};

absl::StatusOr<HopTiles> TilesOf(const LayerIndex& index, int32_t heads, const ShardLayout& mine,
                                 const ShardLayout& owner, const torch::TensorOptions& device) {
  HopTiles hop{.tiles = index.Tiles()};
  if (index.pattern != kernels::TilePattern::kCsr) return hop;
  const int64_t query_tiles = (mine.local_tokens() + index.tile - 1) / index.tile;
  const int64_t key_tiles = (owner.local_tokens() + index.tile - 1) / index.tile;
  // No list can be longer.
  const int64_t capacity =
      heads * query_tiles *
      std::min(key_tiles, int64_t{index.kept_blocks} * (index.block_size / index.tile));
  const auto ints = device.dtype(torch::kInt);
  const Tensor row_offsets = torch::empty({heads, query_tiles + 1}, ints),
               columns = torch::empty({capacity}, ints),
               column_offsets = torch::empty({heads, key_tiles + 1}, ints),
               rows = torch::empty({capacity}, ints);
  const kernels::index::TileListsArgs lists = {
      .chosen = index.chosen.data(),
      .query_layout = mine,
      .key_layout = owner,
      .document_starts = index.document_starts(),
      .heads = heads,
      .tile = index.tile,
      .block_size = index.block_size,
      .capacity = capacity,
      .row_offsets = row_offsets.mutable_data_ptr<int32_t>(),
      .columns = columns.mutable_data_ptr<int32_t>(),
      .column_offsets = column_offsets.mutable_data_ptr<int32_t>(),
      .rows = rows.mutable_data_ptr<int32_t>()};
  RETURN_IF_ERROR(kernels::index::BuildTileLists(lists, Stream()));
  hop.tiles.row_offsets = lists.row_offsets;
  hop.tiles.columns = lists.columns;
  hop.tiles.column_offsets = lists.column_offsets;
  hop.tiles.rows = lists.rows;
  hop.lists = {row_offsets, columns, column_offsets, rows};
  return hop;
}

}  // namespace

absl::Status CudaAttentionDevice::Begin(double AttentionSeconds::*phase) {
  return stats_.timers().Begin(phase, Stream());
}

absl::Status CudaAttentionDevice::End() {
  return stats_.timers().End(Stream());
}

std::shared_ptr<const DeviceDocuments> CudaAttentionDevice::Upload(
    std::shared_ptr<const SequenceDocuments> documents, int estimate_queries) {
  const EstimateQueries estimate =
      ChooseEstimateQueries(documents->tokens, estimate_queries, documents.get());
  return std::make_shared<DeviceDocuments>(
      DeviceDocuments{.host = documents,
                      .local_starts = UploadArray(documents->local_starts),
                      .estimate_positions = UploadArray(estimate.positions),
                      .estimate_starts = UploadArray(estimate.starts)});
}

void* CudaAttentionDevice::Reserve(RingMemory& memory, size_t bytes,
                                   std::span<const comm::Channel> channels) {
  if (memory.bytes >= bytes) return memory.data.get();
  memory = {};  // before the larger one is allocated
  absl::StatusOr<std::shared_ptr<void>> data = communicator_.Allocate(bytes, channels);
  if (absl::IsResourceExhausted(data.status())) {
    c10::cuda::CUDACachingAllocator::emptyCache();  // LibTorch may hold what it does not use
    data = communicator_.Allocate(bytes, channels);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, !absl::IsResourceExhausted(data.status()),
                   std::string(data.status().message()));
  kernels::ops::Check(data.status());
  memory = {*std::move(data), bytes};
  return memory.data.get();
}

std::unique_ptr<DeviceSlots> CudaAttentionDevice::KvSlots(const ring::RingSchedule& schedule,
                                                          size_t bytes_per_slot) {
  SlotMemory memory{.bytes_per_slot = bytes_per_slot};
  if (schedule.ranks > 1) {
    memory.slots = Reserve(kv_memory_, schedule.kv_slots * bytes_per_slot, kKvChannels);
  }
  return std::make_unique<DeviceSlots>(&communicator_, kKvChannels[0], kKvChannels[1],
                                       &stats_.timers(), memory);
}

std::unique_ptr<DeviceSlots> CudaAttentionDevice::GradientSlots(const ring::RingSchedule& schedule,
                                                                size_t bytes_per_slot) {
  const size_t bytes = schedule.grad_slots * bytes_per_slot;
  SlotMemory memory{.slots = Reserve(gradient_memory_, bytes, kGradientChannels),
                    .bytes_per_slot = bytes_per_slot};
  if (options_.bf16_gradients && schedule.ranks > 1 && !Gathers(schedule)) {
    memory.wire = Reserve(wire_memory_, bytes / 2, kGradientChannels);
  }
  return std::make_unique<DeviceSlots>(&communicator_, kGradientChannels[0], kGradientChannels[1],
                                       &stats_.timers(), memory);
}

int64_t CudaAttentionDevice::BandTilesOf(const LayerIndex& index, const ShardLayout& mine,
                                         const ShardLayout& owner) {
  if (band_documents_ != index.documents) {
    band_tiles_.clear();
    band_documents_ = index.documents;
  }
  const auto [known, inserted] =
      band_tiles_.try_emplace({owner.rank, mine.tokens, index.window}, int64_t{0});
  if (inserted) {
    known->second = BandTiles(
        mine, owner, index.tile, index.window,
        index.documents == nullptr ? nullptr : index.documents->host->local_starts.data());
  }
  return known->second;
}

absl::StatusOr<std::unique_ptr<RingSlots>> CudaKeys::Place(const ring::RingSchedule& schedule) {
  std::unique_ptr<DeviceSlots> slots =
      device_.KvSlots(schedule, 2 * k_.numel() * sizeof(__nv_bfloat16));
  if (schedule.ranks == 1) return slots;
  void* const own = slots->memory(Gathers(schedule) ? schedule.rank : 0);
  RETURN_IF_ERROR(fused::PackKv(View(k_), View(v_), static_cast<__nv_bfloat16*>(own), Stream()));
  if (Gathers(schedule)) RETURN_IF_ERROR(slots->StartAllGather());
  return slots;
}

TokenMajor<const __nv_bfloat16> CudaKeys::At(const StepKeys& keys, int part) const {
  if (keys.slot == nullptr) return View(part == 0 ? k_ : v_);
  return DenseView(static_cast<const __nv_bfloat16*>(keys.slot) + part * k_.numel(), k_.size(0),
                   static_cast<int32_t>(k_.size(1)), static_cast<int32_t>(k_.size(2)));
}

CudaForward::CudaForward(CudaAttentionDevice* device, const Tensor& q, const Tensor& k,
                         const Tensor& v, AttentionOutput* output)
    : device_(*device),
      q_(q),
      k_(k),
      shape_(ShapeOf(q, k)),
      keys_(device, k, v),
      output_(*output) {}

IndexDevice& CudaForward::ForIndex(int layer) {
  layer_ = layer;
  return index_device_.emplace(&device_.communicator(), &device_.stats(), layer, q_, k_);
}

absl::Status CudaForward::StartOutput(const LayerIndex& index, const ShardLayout& mine) {
  index_ = &index;
  mine_ = mine;
  const auto floats = q_.options().dtype(torch::kFloat);
  sums_ = torch::empty(q_.sizes(), floats);
  output_.lse =
      torch::full({shape_.heads, shape_.tokens}, -std::numeric_limits<float>::infinity(), floats);
  return absl::OkStatus();
}

absl::Status CudaForward::GatherColumns(const StepKeys& keys) {
  return sm90::GatherColumns(
      keys_.At(keys, 0), keys_.At(keys, 1), keys.owner, index_->Columns(), shape_.heads,
      reinterpret_cast<__nv_bfloat16*>(index_->column_keys.data()),
      reinterpret_cast<__nv_bfloat16*>(index_->column_values.data()), Stream());
}

absl::Status CudaForward::Attend(const StepKeys& keys) {
  ASSIGN_OR_RETURN(const HopTiles hop,
                   TilesOf(*index_, shape_.heads, mine_, keys.owner, q_.options()));
  RETURN_IF_ERROR(CallWithWorkspace(
      kernels::AttentionForwardArgs<__nv_bfloat16>{.q = View(q_),
                                                   .k = keys_.At(keys, 0),
                                                   .v = keys_.At(keys, 1),
                                                   .out = FloatView(sums_),
                                                   .lse = output_.lse.mutable_data_ptr<float>(),
                                                   .query_layout = mine_,
                                                   .key_layout = keys.owner,
                                                   .tiles = hop.tiles,
                                                   .scale = shape_.scale()},
      q_, sm90::ForwardWorkspaceBytes, sm90::AttentionForward));
  return CountTiles(keys, hop.tiles);
}

absl::Status CudaForward::CountTiles(const StepKeys& keys, const kernels::TileSelection& tiles) {
  switch (tiles.pattern) {
    case kernels::TilePattern::kToeplitz:
      return absl::OkStatus();  // counted with the selection
    case kernels::TilePattern::kCsr: {
      const int64_t query_tiles = (shape_.tokens + index_->tile - 1) / index_->tile;
      return kernels::index::CountListed(
          tiles.row_offsets, shape_.heads * (query_tiles + 1),
          device_.stats().SlotsOf(layer_).owner_tiles + keys.owner.rank, Stream());
    }
    case kernels::TilePattern::kFull:
    case kernels::TilePattern::kCausal:
    case kernels::TilePattern::kWindow:
      break;
  }
  device_.StatsOf(layer_).tiles_per_ring_step[keys.step] +=
      device_.BandTilesOf(*index_, mine_, keys.owner) * shape_.heads;
  return absl::OkStatus();
}

absl::Status CudaForward::AttendColumns() {
  return CallWithWorkspace(sm90::ColumnForwardArgs{.q = View(q_),
                                                   .keys = Bf16(index_->column_keys),
                                                   .values = Bf16(index_->column_values),
                                                   .columns = index_->Columns(),
                                                   .tiles = index_->Tiles(),
                                                   .query_layout = mine_,
                                                   .out = FloatView(sums_),
                                                   .lse = output_.lse.mutable_data_ptr<float>(),
                                                   .scale = shape_.scale()},
                           q_, sm90::ColumnForwardWorkspaceBytes, sm90::ColumnForward);
}

absl::Status CudaForward::Finish() {
  output_.out = torch::empty(q_.sizes(), q_.options());
  return fused::FinishOutput(
      DenseView(sums_.const_data_ptr<float>(), shape_.tokens, shape_.heads, shape_.head_dim),
      output_.lse.const_data_ptr<float>(), MutableBf16(output_.out), Stream());
}

CudaBackward::CudaBackward(CudaAttentionDevice* device, const AttentionTensors& tensors,
                           AttentionGradients* gradients)
    : device_(*device),
      tensors_(tensors),
      shape_(ShapeOf(tensors.q, tensors.k)),
      keys_(device, tensors.k, tensors.v),
      gradients_(*gradients) {}

TokenMajor<float> CudaBackward::SlotPart(void* slot, int part) const {
  return DenseView(static_cast<float*>(slot) + part * shape_.kv_elements(), shape_.tokens,
                   shape_.kv_heads, shape_.head_dim);
}

absl::StatusOr<std::unique_ptr<RingSlots>> CudaBackward::PlaceGradients(
    const ring::RingSchedule& schedule) {
  return device_.GradientSlots(schedule, 2 * shape_.kv_elements() * sizeof(float));
}

absl::Status CudaBackward::StartGradients(const LayerIndex& index, const ShardLayout& mine) {
  index_ = &index;
  mine_ = mine;
  dq_sums_ = torch::zeros({shape_.tokens, shape_.heads, shape_.head_dim},
                          tensors_.q.options().dtype(torch::kFloat));
  delta_ = torch::empty_like(tensors_.lse);
  return fused::RowDelta(View(tensors_.d_out), View(tensors_.out), delta_.mutable_data_ptr<float>(),
                         Stream());
}

absl::Status CudaBackward::ColumnsBackward() {
  d_columns_ =
      torch::zeros({2, shape_.heads, index_->max_columns, shape_.head_dim}, dq_sums_.options());
  return CallWithWorkspace(
      sm90::ColumnBackwardArgs{.q = View(tensors_.q),
                               .d_out = View(tensors_.d_out),
                               .keys = Bf16(index_->column_keys),
                               .values = Bf16(index_->column_values),
                               .columns = index_->Columns(),
                               .tiles = index_->Tiles(),
                               .query_layout = mine_,
                               .lse = tensors_.lse.const_data_ptr<float>(),
                               .delta = delta_.const_data_ptr<float>(),
                               .dq = FloatView(dq_sums_),
                               .d_keys = d_columns_[0].mutable_data_ptr<float>(),
                               .d_values = d_columns_[1].mutable_data_ptr<float>(),
                               .scale = shape_.scale(),
                               .deterministic = device_.options().deterministic},
      dq_sums_, sm90::ColumnBackwardWorkspaceBytes, sm90::ColumnBackward);
}

absl::Status CudaBackward::AttendBackward(const StepKeys& keys, void* slot) {
  ASSIGN_OR_RETURN(const HopTiles hop,
                   TilesOf(*index_, shape_.heads, mine_, keys.owner, dq_sums_.options()));
  return CallWithWorkspace(
      kernels::AttentionBackwardArgs<__nv_bfloat16>{
          .q = View(tensors_.q),
          .k = keys_.At(keys, 0),
          .v = keys_.At(keys, 1),
          .d_out = View(tensors_.d_out),
          .lse = tensors_.lse.const_data_ptr<float>(),
          .delta = delta_.const_data_ptr<float>(),
          .dq = FloatView(dq_sums_),
          .dk = SlotPart(slot, 0),
          .dv = SlotPart(slot, 1),
          .query_layout = mine_,
          .key_layout = keys.owner,
          .tiles = hop.tiles,
          .scale = shape_.scale(),
          .deterministic = device_.options().deterministic},
      dq_sums_, sm90::BackwardWorkspaceBytes, sm90::AttentionBackward);
}

absl::Status CudaBackward::ScatterColumns(const StepKeys& keys, void* slot) {
  return sm90::ScatterColumns(d_columns_[0].const_data_ptr<float>(),
                              d_columns_[1].const_data_ptr<float>(), keys.owner, index_->Columns(),
                              shape_.heads, SlotPart(slot, 0), SlotPart(slot, 1), Stream());
}

absl::Status CudaBackward::FinishQueries() {
  delta_.reset();  // what follows may have their memory
  d_columns_.reset();
  gradients_.dq = torch::empty(dq_sums_.sizes(), tensors_.q.options());
  return fused::RoundToBf16(dq_sums_.const_data_ptr<float>(), MutableBf16(gradients_.dq),
                            gradients_.dq.numel(), Stream());
}

absl::Status CudaBackward::ReturnGradients(const ring::RingSchedule& schedule, RingSlots& slots) {
  const Tensor dkv =
      torch::empty({2, shape_.tokens, shape_.kv_heads, shape_.head_dim}, tensors_.q.options());
  gradients_.dk = dkv[0];
  gradients_.dv = dkv[1];
  auto* const sums = static_cast<float*>(slots.memory(schedule.home_grad_slot));
  const int64_t elements = dkv.numel();
  const auto sum_over_ranks = [&](const void* data, void* receive, comm::ElementType type) {
    return AwaitTransfer(device_.communicator().ReduceScatterSum(comm::Channel::kGradKv, data,
                                                                 elements, receive, type, Stream()),
                         device_.stats().timers(), Stream());
  };
  if (Gathers(schedule) && device_.options().bf16_gradients) {
    const Tensor rounded = torch::empty({schedule.ranks, elements}, dkv.options());
    RETURN_IF_ERROR(fused::RoundToBf16(static_cast<const float*>(slots.memory(0)),
                                       MutableBf16(rounded), rounded.numel(), Stream()));
    return sum_over_ranks(rounded.const_data_ptr(), dkv.mutable_data_ptr(),
                          comm::ElementType::kBfloat16);
  }
  if (Gathers(schedule)) {
    RETURN_IF_ERROR(sum_over_ranks(slots.memory(0), sums, comm::ElementType::kFloat32));
  }
  return fused::RoundToBf16(sums, MutableBf16(dkv), elements, Stream());
}

}  // namespace ringleader::attention
