#include "worker/attention/runner/attention_engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/reference/attention/attention.h"
#include "kernels/reference/attention/columns.h"
#include "kernels/reference/tiles/tile_lists.h"
#include "patterns/check_options.h"
#include "worker/attention/stats/stopwatch.h"
#include "worker/attention/stats/tile_counts.h"

namespace ringleader::attention {

using kernels::ShardLayout;
using kernels::TokenMajor;

namespace {

// Keys and values of a slot lie behind each other, dense.
TokenMajor<float> SlotTensor(float* slot, int part, const TokenMajor<const float>& like) {
  const int64_t row = int64_t{like.heads} * like.head_dim;
  return {.data = slot + part * like.tokens * row,
          .tokens = like.tokens,
          .heads = like.heads,
          .head_dim = like.head_dim,
          .token_stride = row,
          .head_stride = like.head_dim};
}

TokenMajor<const float> Const(const TokenMajor<float>& x) {
  return {x.data, x.tokens, x.heads, x.head_dim, x.token_stride, x.head_stride};
}

void CopyDense(const TokenMajor<const float>& from, const TokenMajor<float>& to) {
  for (int64_t i = 0; i < from.tokens; ++i) {
    for (int head = 0; head < from.heads; ++head) {
      std::memcpy(to.data + i * to.token_stride + head * to.head_stride,
                  from.data + i * from.token_stride + head * from.head_stride,
                  from.head_dim * sizeof(float));
    }
  }
}

// Seconds of a phase without the communication that was waited for in it.
class PhaseTimer {
 public:
  PhaseTimer(AttentionSeconds& seconds, double AttentionSeconds::*phase)
      : seconds_(seconds),
        phase_(phase),
        exposed_before_(seconds.exposed_communication),
        watch_(&(seconds.*phase)) {}
  ~PhaseTimer() { seconds_.*phase_ -= seconds_.exposed_communication - exposed_before_; }

 private:
  AttentionSeconds& seconds_;
  double AttentionSeconds::*const phase_;
  const double exposed_before_;
  const Stopwatch watch_;
};

float ScaleOf(const TokenMajor<const float>& q) {
  return 1.0f / std::sqrt(static_cast<float>(q.head_dim));
}

}  // namespace

absl::StatusOr<std::shared_ptr<AttentionEngine>> AttentionEngine::Create(
    const patterns::AttentionOptions& options, comm::Communicator* communicator) {
  patterns::AttentionOptions checked = options;
  if (checked.stripe == 0) checked.stripe = checked.tile;
  RETURN_IF_ERROR(patterns::CheckOptions(checked, communicator->size()));
  std::shared_ptr<AttentionEngine> engine(new AttentionEngine(checked, communicator));
  ASSIGN_OR_RETURN(engine->forward_, ring::ForwardSchedule(options.ring, communicator->rank()));
  ASSIGN_OR_RETURN(engine->backward_, ring::BackwardSchedule(options.ring, communicator->rank()));
  return engine;
}

AttentionEngine::AttentionEngine(const patterns::AttentionOptions& options,
                                 comm::Communicator* communicator)
    : options_(options),
      communicator_(communicator),
      engine_(options.threads),
      budgets_(options_),
      index_builder_(options_, communicator, &engine_, &stats_.seconds.exposed_communication) {}

ShardLayout AttentionEngine::LayoutOf(int rank, int64_t local_tokens) const {
  return patterns::LayoutOf(options_, communicator_->size(), rank, local_tokens);
}

LayerStats& AttentionEngine::StatsOf(int layer) {
  if (layer >= static_cast<int>(stats_.layers.size())) stats_.layers.resize(layer + 1);
  return stats_.layers[layer];
}

absl::Status AttentionEngine::SetBudgets(std::span<const patterns::LayerBudget> budgets) {
  return budgets_.Set(budgets);
}

absl::Status AttentionEngine::SetDocuments(int64_t tokens, std::span<const int64_t> firsts) {
  ASSIGN_OR_RETURN(documents_,
                   MakeDocuments(LayoutOf(forward_.rank, tokens / communicator_->size()), firsts));
  return absl::OkStatus();
}

// Sums become means over the calls.
AttentionStats AttentionEngine::TakeStats() {
  AttentionStats stats = std::exchange(stats_, {});
  for (LayerStats& layer : stats.layers) {
    if (layer.calls == 0) continue;
    layer.verticals /= layer.calls;
    layer.slashes /= layer.calls;
    if (layer.recall >= 0.0) layer.recall /= layer.calls;
    layer.density =
        static_cast<double>(layer.TotalTiles()) / static_cast<double>(layer.causal_tiles);
  }
  return stats;
}

absl::StatusOr<std::unique_ptr<TravellingBuffers>> AttentionEngine::LoadKv(
    const ring::RingSchedule& schedule, const TokenMajor<const float>& k,
    const TokenMajor<const float>& v) {
  const size_t floats = 2 * k.tokens * k.heads * k.head_dim;
  auto buffers = std::make_unique<TravellingBuffers>(
      communicator_, schedule.kv_slots, floats, comm::Channel::kKvInner, comm::Channel::kKvOuter,
      &stats_.seconds.exposed_communication);
  const bool gather = schedule.shape.kind == ring::RingKind::kAllGather;
  float* own = buffers->data(gather ? schedule.rank : 0);
  CopyDense(k, SlotTensor(own, 0, k));
  CopyDense(v, SlotTensor(own, 1, v));
  if (gather && schedule.ranks > 1) {
    const Stopwatch watch(&stats_.seconds.exposed_communication);
    const std::vector<float> mine(own, own + floats);
    RETURN_IF_ERROR(communicator_->AllGather(comm::Channel::kKvInner, mine.data(),
                                             floats * sizeof(float), buffers->data(0)));
  }
  for (const ring::RingHop& hop : schedule.first_hops) RETURN_IF_ERROR(buffers->Start(hop));
  return buffers;
}

absl::StatusOr<std::shared_ptr<const LayerIndex>> AttentionEngine::Forward(
    int layer, const TokenMajor<const float>& q, const TokenMajor<const float>& k,
    const TokenMajor<const float>& v, const TokenMajor<float>& out, float* lse) {
  if (started_ != nullptr) {
    return absl::FailedPreconditionError("forward between a backward's start and its call");
  }
  RETURN_IF_ERROR(patterns::CheckLength(options_, communicator_->size(), q.tokens));
  RETURN_IF_ERROR(CheckDocuments(documents_.get(), q.tokens * communicator_->size()));
  // The first hop travels while the index is built.
  ASSIGN_OR_RETURN(const std::unique_ptr<TravellingBuffers> kv, LoadKv(forward_, k, v));
  LayerStats& stats = StatsOf(layer);
  std::shared_ptr<LayerIndex> index;
  {
    const PhaseTimer timer(stats_.seconds, &AttentionSeconds::index);
    ASSIGN_OR_RETURN(index, index_builder_.Build(
                                budgets_.Of(layer),
                                {.q = q,
                                 .k = k,
                                 .scale = ScaleOf(q),
                                 .layout_of = [&](int rank) { return LayoutOf(rank, k.tokens); },
                                 .documents = documents_},
                                stats));
  }
  const size_t column_floats = index->column_positions.size() * q.head_dim;
  index->column_keys.resize(column_floats);
  index->column_values.resize(column_floats);
  stats.tiles_per_ring_step.resize(forward_.steps.size());
  const ShardLayout mine = LayoutOf(forward_.rank, q.tokens);
  for (size_t t = 0; t < forward_.steps.size(); ++t) {
    const ring::RingStep& step = forward_.steps[t];
    for (const ring::RingHop& hop : step.kv_hops) RETURN_IF_ERROR(kv->Start(hop));
    RETURN_IF_ERROR(kv->AwaitContent(step.kv_slot));
    const Stopwatch watch(&stats_.seconds.forward);
    int64_t tiles = 0;
    RETURN_IF_ERROR(
        kernels::reference::AttentionForward(engine_,
                                             {.q = q,
                                              .k = Const(SlotTensor(kv->data(step.kv_slot), 0, k)),
                                              .v = Const(SlotTensor(kv->data(step.kv_slot), 1, v)),
                                              .out = out,
                                              .lse = lse,
                                              .query_layout = mine,
                                              .key_layout = LayoutOf(step.owner, k.tokens),
                                              .tiles = index->TilesOf(step.owner),
                                              .scale = ScaleOf(q)},
                                             &tiles));
    stats.tiles_per_ring_step[t] += tiles;
  }
  if (index->max_columns > 0) {
    const Stopwatch watch(&stats_.seconds.forward);
    int64_t tiles = 0;
    RETURN_IF_ERROR(kernels::reference::ColumnForward(engine_,
                                                      {.q = q,
                                                       .keys = index->column_keys.data(),
                                                       .values = index->column_values.data(),
                                                       .columns = index->Columns(),
                                                       .tiles = index->TilesOf(forward_.rank),
                                                       .query_layout = mine,
                                                       .out = out,
                                                       .lse = lse,
                                                       .scale = ScaleOf(q)},
                                                      &tiles));
    stats.column_tiles += tiles;
  }
  stats.causal_tiles += CausalTiles(mine, options_.tile) * q.heads;
  ++stats.calls;
  RETURN_IF_ERROR(kv->AwaitAll());
  return index;
}

absl::Status AttentionEngine::StartBackward(const TokenMajor<const float>& k,
                                            const TokenMajor<const float>& v) {
  if (started_ != nullptr) {
    return absl::FailedPreconditionError("a backward has been started and not been called");
  }
  ASSIGN_OR_RETURN(started_, LoadKv(backward_, k, v));
  return absl::OkStatus();
}

absl::Status AttentionEngine::Backward(const LayerIndex& index, const BackwardCall& call) {
  const auto& [q, k, v, out, d_out, lse, dq, dk, dv] = call;
  std::unique_ptr<TravellingBuffers> kv = std::move(started_);
  if (kv == nullptr) {
    ASSIGN_OR_RETURN(kv, LoadKv(backward_, k, v));
  }
  TravellingBuffers grads(communicator_, backward_.grad_slots, kv->floats_per_slot(),
                          comm::Channel::kGradKv, comm::Channel::kGradKv,
                          &stats_.seconds.exposed_communication);
  std::vector<float> delta(q.heads * q.tokens);
  {
    const Stopwatch watch(&stats_.seconds.backward);
    kernels::reference::AttentionDelta(engine_, d_out, out, delta.data());
  }
  const ShardLayout mine = LayoutOf(backward_.rank, q.tokens);
  // Gradients of the columns are ready before their owners' keys pass by.
  std::vector<float> d_column_keys(index.column_keys.size(), 0.0f);
  std::vector<float> d_column_values(index.column_values.size(), 0.0f);
  if (index.max_columns > 0) {
    const Stopwatch watch(&stats_.seconds.backward);
    RETURN_IF_ERROR(
        kernels::reference::ColumnBackward(engine_, {.q = q,
                                                     .d_out = d_out,
                                                     .keys = index.column_keys.data(),
                                                     .values = index.column_values.data(),
                                                     .columns = index.Columns(),
                                                     .tiles = index.TilesOf(backward_.rank),
                                                     .query_layout = mine,
                                                     .lse = lse,
                                                     .delta = delta.data(),
                                                     .dq = dq,
                                                     .d_keys = d_column_keys.data(),
                                                     .d_values = d_column_values.data(),
                                                     .scale = ScaleOf(q)}));
  }
  for (size_t t = 0; t < backward_.steps.size(); ++t) {
    const ring::RingStep& step = backward_.steps[t];
    for (const ring::RingHop& hop : step.kv_hops) RETURN_IF_ERROR(kv->Start(hop));
    RETURN_IF_ERROR(kv->AwaitContent(step.kv_slot));
    RETURN_IF_ERROR(grads.AwaitIdle(step.grad_slot));
    float* const slot = grads.data(step.grad_slot);
    {
      const Stopwatch watch(&stats_.seconds.backward);
      std::fill_n(slot, grads.floats_per_slot(), 0.0f);
      RETURN_IF_ERROR(kernels::reference::AttentionBackward(
          engine_, {.q = q,
                    .k = Const(SlotTensor(kv->data(step.kv_slot), 0, k)),
                    .v = Const(SlotTensor(kv->data(step.kv_slot), 1, v)),
                    .d_out = d_out,
                    .lse = lse,
                    .delta = delta.data(),
                    .dq = dq,
                    .dk = SlotTensor(slot, 0, k),
                    .dv = SlotTensor(slot, 1, v),
                    .query_layout = mine,
                    .key_layout = LayoutOf(step.owner, k.tokens),
                    .tiles = index.TilesOf(step.owner),
                    .scale = ScaleOf(q)}));
      if (index.max_columns > 0) {
        kernels::reference::ScatterColumns(d_column_keys.data(), d_column_values.data(),
                                           LayoutOf(step.owner, k.tokens), index.Columns(), q.heads,
                                           SlotTensor(slot, 0, k), SlotTensor(slot, 1, v));
      }
    }
    for (const ring::GradAction& action : step.grad_actions) {
      if (action.kind == ring::GradAction::Kind::kAdd) {
        RETURN_IF_ERROR(grads.Add(action.to_slot, action.from_slot));
      } else {
        RETURN_IF_ERROR(grads.Start(action.hop));
      }
    }
  }
  RETURN_IF_ERROR(kv->AwaitAll());
  return ReturnGradients(backward_, grads, call);
}

absl::Status AttentionEngine::ReturnGradients(const ring::RingSchedule& schedule,
                                              TravellingBuffers& grads, const BackwardCall& call) {
  RETURN_IF_ERROR(grads.AwaitAll());
  const float* home = grads.data(schedule.home_grad_slot);
  std::vector<float> reduced;
  if (schedule.shape.kind == ring::RingKind::kAllGather && schedule.ranks > 1) {
    const Stopwatch watch(&stats_.seconds.exposed_communication);
    reduced.resize(grads.floats_per_slot());
    RETURN_IF_ERROR(communicator_->ReduceScatterSum(comm::Channel::kGradKv, grads.data(0),
                                                    grads.floats_per_slot(), reduced.data()));
    home = reduced.data();
  }
  const size_t part = grads.floats_per_slot() / 2;
  std::copy_n(home, part, call.dk.data);
  std::copy_n(home + part, part, call.dv.data);
  return absl::OkStatus();
}

}  // namespace ringleader::attention
