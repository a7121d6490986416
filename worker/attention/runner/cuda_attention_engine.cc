#include "worker/attention/runner/cuda_attention_engine.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/sm90/attention.h"
#include "kernels/sm90/columns.h"
#include "patterns/check_options.h"
#include "worker/attention/cuda/row_kernels.h"
#include "worker/attention/stats/tile_counts.h"

namespace ringleader::attention {

namespace sm90 = kernels::sm90;
using kernels::ShardLayout;
using kernels::TokenMajor;
using kernels::ops::Bf16;
using kernels::ops::Check;
using kernels::ops::FloatView;
using kernels::ops::MutableBf16;
using kernels::ops::Stream;
using kernels::ops::View;
using torch::Tensor;

namespace {

// Inside a node, between nodes. Sums between nodes go where nothing that an inner ring waits for
// queues behind them.
constexpr std::array kKvChannels = {comm::Channel::kKvInner, comm::Channel::kKvOuter};
constexpr std::array kGradChannels = {comm::Channel::kGradKv, comm::Channel::kKvOuter};

template <typename T>
TokenMajor<T> DenseView(T* data, int64_t tokens, int32_t heads, int32_t head_dim) {
  return {data, tokens, heads, head_dim, int64_t{heads} * head_dim, head_dim};
}

void Zero(void* data, size_t bytes, cudaStream_t stream) {
  Check(kernels::fused::CudaStatus(cudaMemsetAsync(data, 0, bytes, stream), "attention: memset",
                                   __FILE__, __LINE__));
}

template <typename Args, typename Bytes, typename Run>
void CallWithWorkspace(const Args& args, const Tensor& like, Bytes bytes, Run run) {
  const int64_t needed = bytes(args);
  const Tensor scratch = kernels::ops::Scratch(needed, like);
  Check(run(args, sm90::Workspace{scratch.mutable_data_ptr(), needed}, Stream()));
}

}  // namespace

absl::StatusOr<std::shared_ptr<CudaAttentionEngine>> CudaAttentionEngine::Create(
    const patterns::AttentionOptions& options, comm::DeviceCommunicator* communicator) {
  patterns::AttentionOptions checked = options;
  if (checked.stripe == 0) checked.stripe = checked.tile;
  RETURN_IF_ERROR(patterns::CheckOptions(checked, communicator->size()));
  std::shared_ptr<CudaAttentionEngine> engine(new CudaAttentionEngine(checked, communicator));
  ASSIGN_OR_RETURN(engine->forward_, ring::ForwardSchedule(options.ring, communicator->rank()));
  ASSIGN_OR_RETURN(engine->backward_, ring::BackwardSchedule(options.ring, communicator->rank()));
  return engine;
}

CudaAttentionEngine::CudaAttentionEngine(const patterns::AttentionOptions& options,
                                         comm::DeviceCommunicator* communicator)
    : options_(options),
      communicator_(communicator),
      budgets_(options_),
      stats_(communicator->size()),
      index_builder_(options_, communicator, &stats_.timers()),
      kv_(communicator, kKvChannels[0], kKvChannels[1], &stats_.timers()),
      grads_(communicator, kGradChannels[0], kGradChannels[1], &stats_.timers()) {}

CudaAttentionEngine::Shape CudaAttentionEngine::ShapeOf(const Tensor& q, const Tensor& k) const {
  return {.tokens = q.size(0),
          .heads = static_cast<int32_t>(q.size(1)),
          .kv_heads = static_cast<int32_t>(k.size(1)),
          .head_dim = static_cast<int32_t>(q.size(2)),
          .scale = 1.0f / std::sqrt(static_cast<float>(q.size(2))),
          .layout = patterns::LayoutOf(options_, communicator_->size(), communicator_->rank(),
                                       q.size(0))};
}

ShardLayout CudaAttentionEngine::LayoutOf(int rank, const Shape& shape) const {
  ShardLayout layout = shape.layout;
  layout.rank = rank;
  return layout;
}

void* CudaAttentionEngine::Reserve(RingMemory& memory, size_t bytes,
                                   std::span<const comm::Channel> channels) {
  if (memory.bytes >= bytes) return memory.data.get();
  memory = {};  // before the larger one is allocated
  absl::StatusOr<std::shared_ptr<void>> data = communicator_->Allocate(bytes, channels);
  if (absl::IsResourceExhausted(data.status())) {
    c10::cuda::CUDACachingAllocator::emptyCache();  // LibTorch may hold what it does not use
    data = communicator_->Allocate(bytes, channels);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, !absl::IsResourceExhausted(data.status()),
                   std::string(data.status().message()));
  Check(data.status());
  memory = {*std::move(data), bytes};
  return memory.data.get();
}

void CudaAttentionEngine::PlaceKv(const ring::RingSchedule& schedule, const Tensor& k,
                                  const Tensor& v) {
  if (schedule.ranks == 1) return;
  const size_t bytes = 2 * k.numel() * sizeof(__nv_bfloat16);
  kv_.Use(Reserve(kv_memory_, schedule.kv_slots * bytes, kKvChannels), bytes, /*wire=*/nullptr);
  const int own = gathers() ? schedule.rank : 0;
  Check(PackKv(View(k), View(v), static_cast<__nv_bfloat16*>(kv_.data(own)), Stream()));
  if (gathers()) Check(kv_.StartAllGather(Stream()));
}

void CudaAttentionEngine::StartFirstHops(const ring::RingSchedule& schedule, ring::RingLink link) {
  for (const ring::RingHop& hop : schedule.first_hops) {
    if (hop.link == link) Check(kv_.Start(hop, Stream()));
  }
}

CudaAttentionEngine::KeyValues CudaAttentionEngine::ArriveKv(const ring::RingSchedule& schedule,
                                                             size_t step, const Shape& shape,
                                                             const Tensor& k, const Tensor& v) {
  const ring::RingStep& now = schedule.steps[step];
  for (const ring::RingHop& hop : now.kv_hops) Check(kv_.Start(hop, Stream()));
  // Its own keys a rank reads where the model left them, while the slot is being sent.
  if (now.owner == schedule.rank) return {View(k), View(v)};
  Check(kv_.AwaitContent(now.kv_slot, Stream()));
  const auto* const slot = static_cast<const __nv_bfloat16*>(kv_.data(now.kv_slot));
  const auto view = [&](const __nv_bfloat16* data) {
    return DenseView(data, shape.tokens, shape.kv_heads, shape.head_dim);
  };
  return {view(slot), view(slot + shape.kv_elements())};
}

void CudaAttentionEngine::CountTiles(int layer, const CudaLayerIndex& index, size_t step,
                                     const Shape& shape, const kernels::TileSelection& tiles) {
  const int owner = forward_.steps[step].owner;
  switch (index.pattern) {
    case kernels::TilePattern::kToeplitz:
      return;  // counted with the selection
    case kernels::TilePattern::kCsr: {
      const int64_t query_tiles = (shape.tokens + index.tile - 1) / index.tile;
      Check(CountListed(tiles.row_offsets, shape.heads * (query_tiles + 1),
                        stats_.SlotsOf(layer).owner_tiles + owner, Stream()));
      return;
    }
    default: {
      const auto [known, inserted] =
          band_tiles_.try_emplace({owner, shape.tokens, index.window}, int64_t{0});
      if (inserted) {
        known->second = BandTiles(
            shape.layout, LayoutOf(owner, shape), index.tile, index.window,
            index.documents == nullptr ? nullptr : index.documents->host->local_starts.data());
      }
      stats_.HostOf(layer).tiles_per_ring_step[step] += known->second * shape.heads;
    }
  }
}

absl::Status CudaAttentionEngine::SetDocuments(int64_t tokens, std::span<const int64_t> firsts) {
  const ShardLayout layout = patterns::LayoutOf(
      options_, communicator_->size(), communicator_->rank(), tokens / communicator_->size());
  ASSIGN_OR_RETURN(std::shared_ptr<const SequenceDocuments> documents,
                   MakeDocuments(layout, firsts));
  if (documents == nullptr && documents_ == nullptr) return absl::OkStatus();
  documents_ = documents == nullptr
                   ? nullptr
                   : UploadDocuments(std::move(documents), options_.estimate_queries);
  band_tiles_.clear();
  return absl::OkStatus();
}

CudaAttentionEngine::Output CudaAttentionEngine::Forward(int layer, const Tensor& q,
                                                         const Tensor& k, const Tensor& v) {
  TORCH_CHECK(!backward_started_, "attention: forward between a backward's start and its call");
  const Shape shape = ShapeOf(q, k);
  Check(patterns::CheckLength(options_, communicator_->size(), shape.tokens));
  Check(CheckDocuments(documents_ == nullptr ? nullptr : documents_->host.get(),
                       shape.layout.tokens));
  DeviceTimers& timers = stats_.timers();
  const cudaStream_t stream = Stream();
  LayerStats& counted = stats_.HostOf(layer);
  counted.tiles_per_ring_step.resize(forward_.steps.size());
  counted.causal_tiles += CausalTiles(shape.layout, options_.tile) * shape.heads;
  ++counted.calls;

  // A hop between nodes travels while the index is built. One inside a node hides behind the first
  // step, and beside the index would slow its collectives and take multiprocessors from its
  // kernels.
  Check(timers.Begin(&AttentionSeconds::forward, stream));
  PlaceKv(forward_, k, v);
  StartFirstHops(forward_, ring::RingLink::kOuter);
  Check(timers.End(stream));
  Check(timers.Begin(&AttentionSeconds::index, stream));
  const std::shared_ptr<CudaLayerIndex> index =
      index_builder_.Build(budgets_.Of(layer),
                           {.q = q,
                            .k = k,
                            .scale = shape.scale,
                            .layout_of = [&](int rank) { return LayoutOf(rank, shape); },
                            .documents = documents_},
                           stats_.SlotsOf(layer));
  if (index->has_columns()) stats_.SetEstimated(layer);
  Check(timers.End(stream));

  Check(timers.Begin(&AttentionSeconds::forward, stream));
  StartFirstHops(forward_, ring::RingLink::kInner);
  const auto floats = q.options().dtype(torch::kFloat);
  const Tensor sums = torch::empty(q.sizes(), floats);  // read only where lse says it was written
  const Tensor lse =
      torch::full({shape.heads, shape.tokens}, -std::numeric_limits<float>::infinity(), floats);
  for (size_t t = 0; t < forward_.steps.size(); ++t) {
    const int owner = forward_.steps[t].owner;
    const KeyValues kv = ArriveKv(forward_, t, shape, k, v);
    const OwnerTiles tiles =
        TilesOf(*index, shape.heads, shape.layout, LayoutOf(owner, shape), q.options());
    if (index->has_columns()) {
      Check(sm90::GatherColumns(kv.k, kv.v, LayoutOf(owner, shape), index->Columns(), shape.heads,
                                MutableBf16(index->column_keys), MutableBf16(index->column_values),
                                stream));
    }
    CallWithWorkspace(
        kernels::AttentionForwardArgs<__nv_bfloat16>{.q = View(q),
                                                     .k = kv.k,
                                                     .v = kv.v,
                                                     .out = FloatView(sums),
                                                     .lse = lse.mutable_data_ptr<float>(),
                                                     .query_layout = shape.layout,
                                                     .key_layout = LayoutOf(owner, shape),
                                                     .tiles = tiles.tiles,
                                                     .scale = shape.scale},
        q, sm90::ForwardWorkspaceBytes, sm90::AttentionForward);
    CountTiles(layer, *index, t, shape, tiles.tiles);
  }
  if (index->has_columns()) {
    CallWithWorkspace(
        sm90::ColumnForwardArgs{
            .q = View(q),
            .keys = Bf16(index->column_keys),
            .values = Bf16(index->column_values),
            .columns = index->Columns(),
            .tiles = TilesOf(*index, shape.heads, shape.layout, shape.layout, q.options()).tiles,
            .query_layout = shape.layout,
            .out = FloatView(sums),
            .lse = lse.mutable_data_ptr<float>(),
            .scale = shape.scale},
        q, sm90::ColumnForwardWorkspaceBytes, sm90::ColumnForward);
  }
  const Tensor out = torch::empty({shape.tokens, shape.heads, shape.head_dim}, q.options());
  Check(FinishOutput(DenseView<const float>(sums.const_data_ptr<float>(), shape.tokens, shape.heads,
                                            shape.head_dim),
                     lse.const_data_ptr<float>(), MutableBf16(out), stream));
  Check(kv_.AwaitAll(stream));
  Check(timers.End(stream));
  return {out, lse, index};
}

void CudaAttentionEngine::StartBackward(const Tensor& k, const Tensor& v) {
  TORCH_CHECK(!backward_started_, "attention: a backward has been started and not been called");
  const cudaStream_t stream = Stream();
  Check(stats_.timers().Begin(&AttentionSeconds::backward, stream));
  PlaceKv(backward_, k, v);
  StartFirstHops(backward_, ring::RingLink::kOuter);
  StartFirstHops(backward_, ring::RingLink::kInner);
  Check(stats_.timers().End(stream));
  backward_started_ = true;
}

AttentionGradients CudaAttentionEngine::Backward(const CudaLayerIndex& index,
                                                 const BackwardCall& call) {
  if (!backward_started_) StartBackward(call.k, call.v);
  backward_started_ = false;
  const Shape shape = ShapeOf(call.q, call.k);
  const cudaStream_t stream = Stream();
  Check(stats_.timers().Begin(&AttentionSeconds::backward, stream));
  const size_t bytes = 2 * shape.kv_elements() * sizeof(float);
  const bool on_wire = options_.bf16_gradients && backward_.ranks > 1 && !gathers();
  grads_.Use(
      Reserve(grad_memory_, backward_.grad_slots * bytes, kGradChannels), bytes,
      on_wire ? Reserve(wire_memory_, backward_.grad_slots * bytes / 2, kGradChannels) : nullptr);
  const Tensor dq_sums = torch::zeros({shape.tokens, shape.heads, shape.head_dim},
                                      call.q.options().dtype(torch::kFloat));
  ComputeGradients(index, call, shape, dq_sums);
  const Tensor dq = torch::empty(dq_sums.sizes(), call.q.options());
  Check(RoundToBf16(dq_sums.const_data_ptr<float>(), MutableBf16(dq), dq.numel(), stream));
  const Tensor dkv =
      torch::empty({2, shape.tokens, shape.kv_heads, shape.head_dim}, call.q.options());
  ReturnGradients(dkv);
  Check(kv_.AwaitAll(stream));
  Check(stats_.timers().End(stream));
  return {.dq = dq, .dk = dkv[0], .dv = dkv[1]};
}

void CudaAttentionEngine::ComputeGradients(const CudaLayerIndex& index, const BackwardCall& call,
                                           const Shape& shape, const Tensor& dq) {
  const cudaStream_t stream = Stream();
  const Tensor delta = torch::empty_like(call.lse);
  Check(RowDelta(View(call.d_out), View(call.out), delta.mutable_data_ptr<float>(), stream));
  // Gradients of the columns are ready before their owners' keys pass by.
  Tensor d_columns;  // [2, heads, max_columns, d]: of keys, of values
  if (index.has_columns()) {
    d_columns =
        torch::zeros({2, shape.heads, index.column_keys.size(1), shape.head_dim}, dq.options());
    CallWithWorkspace(
        sm90::ColumnBackwardArgs{
            .q = View(call.q),
            .d_out = View(call.d_out),
            .keys = Bf16(index.column_keys),
            .values = Bf16(index.column_values),
            .columns = index.Columns(),
            .tiles = TilesOf(index, shape.heads, shape.layout, shape.layout, dq.options()).tiles,
            .query_layout = shape.layout,
            .lse = call.lse.const_data_ptr<float>(),
            .delta = delta.const_data_ptr<float>(),
            .dq = FloatView(dq),
            .d_keys = d_columns[0].mutable_data_ptr<float>(),
            .d_values = d_columns[1].mutable_data_ptr<float>(),
            .scale = shape.scale,
            .deterministic = options_.deterministic},
        dq, sm90::ColumnBackwardWorkspaceBytes, sm90::ColumnBackward);
  }
  for (size_t t = 0; t < backward_.steps.size(); ++t) {
    const ring::RingStep& step = backward_.steps[t];
    const ShardLayout owner = LayoutOf(step.owner, shape);
    const KeyValues kv = ArriveKv(backward_, t, shape, call.k, call.v);
    Check(grads_.AwaitIdle(step.grad_slot, stream));
    auto* const slot = static_cast<float*>(grads_.data(step.grad_slot));
    Zero(slot, grads_.bytes_per_slot(), stream);
    const auto dk = DenseView(slot, shape.tokens, shape.kv_heads, shape.head_dim);
    const auto dv =
        DenseView(slot + shape.kv_elements(), shape.tokens, shape.kv_heads, shape.head_dim);
    const OwnerTiles tiles = TilesOf(index, shape.heads, shape.layout, owner, dq.options());
    CallWithWorkspace(
        kernels::AttentionBackwardArgs<__nv_bfloat16>{.q = View(call.q),
                                                      .k = kv.k,
                                                      .v = kv.v,
                                                      .d_out = View(call.d_out),
                                                      .lse = call.lse.const_data_ptr<float>(),
                                                      .delta = delta.const_data_ptr<float>(),
                                                      .dq = FloatView(dq),
                                                      .dk = dk,
                                                      .dv = dv,
                                                      .query_layout = shape.layout,
                                                      .key_layout = owner,
                                                      .tiles = tiles.tiles,
                                                      .scale = shape.scale,
                                                      .deterministic = options_.deterministic},
        dq, sm90::BackwardWorkspaceBytes, sm90::AttentionBackward);
    if (index.has_columns()) {
      Check(sm90::ScatterColumns(d_columns[0].const_data_ptr<float>(),
                                 d_columns[1].const_data_ptr<float>(), owner, index.Columns(),
                                 shape.heads, dk, dv, stream));
    }
    for (const ring::GradAction& action : step.grad_actions) {
      if (action.kind == ring::GradAction::Kind::kHop) {
        Check(grads_.Start(action.hop, stream));
        continue;
      }
      Check(grads_.AwaitIdle(action.to_slot, stream));
      Check(grads_.AwaitContent(action.from_slot, stream));
      Check(AddFloats(static_cast<float*>(grads_.data(action.to_slot)),
                      static_cast<const float*>(grads_.data(action.from_slot)),
                      2 * shape.kv_elements(), stream));
    }
  }
}

void CudaAttentionEngine::ReturnGradients(const Tensor& dkv) {
  const cudaStream_t stream = Stream();
  Check(grads_.AwaitAll(stream));
  auto* const sums = static_cast<float*>(grads_.data(backward_.home_grad_slot));
  const int64_t elements = dkv.numel();
  if (gathers() && backward_.ranks > 1 && options_.bf16_gradients) {
    const Tensor rounded = torch::empty({backward_.ranks, elements}, dkv.options());
    Check(RoundToBf16(static_cast<const float*>(grads_.data(0)), MutableBf16(rounded),
                      rounded.numel(), stream));
    Check(AwaitTransfer(communicator_->ReduceScatterSum(
                            comm::Channel::kGradKv, rounded.const_data_ptr(), elements,
                            dkv.mutable_data_ptr(), comm::ElementType::kBfloat16, stream),
                        stats_.timers(), stream));
    return;
  }
  if (gathers() && backward_.ranks > 1) {
    Check(AwaitTransfer(
        communicator_->ReduceScatterSum(comm::Channel::kGradKv, grads_.data(0), elements, sums,
                                        comm::ElementType::kFloat32, stream),
        stats_.timers(), stream));
  }
  Check(RoundToBf16(sums, MutableBf16(dkv), elements, stream));
}

}  // namespace ringleader::attention
