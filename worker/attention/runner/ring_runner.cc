#include "worker/attention/runner/ring_runner.h"

#include <utility>

#include "base/status_macros.h"
#include "patterns/check_options.h"
#include "worker/attention/index/build_index.h"
#include "worker/attention/stats/tile_counts.h"

namespace ringleader::attention {

using kernels::ShardLayout;

namespace {

absl::Status StartFirstHops(const ring::RingSchedule& schedule, ring::RingLink link,
                            RingSlots& kv) {
  for (const ring::RingHop& hop : schedule.first_hops) {
    if (hop.link == link) RETURN_IF_ERROR(kv.Start(hop));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<RingRunner>> RingRunner::Create(
    const patterns::AttentionOptions& options, AttentionDevice* device) {
  patterns::AttentionOptions resolved = options;
  if (resolved.stripe == 0) resolved.stripe = resolved.tile;
  RETURN_IF_ERROR(patterns::CheckOptions(resolved, device->ranks()));
  std::unique_ptr<RingRunner> runner(new RingRunner(resolved, device));
  ASSIGN_OR_RETURN(runner->forward_, ring::ForwardSchedule(options.ring, device->rank()));
  ASSIGN_OR_RETURN(runner->backward_, ring::BackwardSchedule(options.ring, device->rank()));
  return runner;
}

RingRunner::RingRunner(const patterns::AttentionOptions& options, AttentionDevice* device)
    : options_(options), device_(*device), budgets_(options_) {}

ShardLayout RingRunner::LayoutOf(int rank, int64_t local_tokens) const {
  return patterns::LayoutOf(options_, device_.ranks(), rank, local_tokens);
}

absl::Status RingRunner::SetBudgets(std::span<const patterns::LayerBudget> budgets) {
  return budgets_.Set(budgets);
}

absl::Status RingRunner::SetDocuments(int64_t tokens, std::span<const int64_t> firsts) {
  ASSIGN_OR_RETURN(std::shared_ptr<const SequenceDocuments> documents,
                   MakeDocuments(LayoutOf(device_.rank(), tokens / device_.ranks()), firsts));
  documents_ = documents == nullptr
                   ? nullptr
                   : device_.Upload(std::move(documents), options_.estimate_queries);
  return absl::OkStatus();
}

AttentionStats RingRunner::TakeStats() {
  return device_.TakeStats(forward_);
}

absl::StatusOr<StepKeys> RingRunner::Arrive(const ring::RingSchedule& schedule, size_t step,
                                            int64_t tokens, RingSlots& kv) {
  const ring::RingStep& now = schedule.steps[step];
  for (const ring::RingHop& hop : now.kv_hops) RETURN_IF_ERROR(kv.Start(hop));
  StepKeys keys{.step = step, .owner = LayoutOf(now.owner, tokens)};
  if (now.owner == schedule.rank) return keys;
  RETURN_IF_ERROR(kv.AwaitContent(now.kv_slot));
  keys.slot = kv.memory(now.kv_slot);
  return keys;
}

absl::StatusOr<std::shared_ptr<const LayerIndex>> RingRunner::Forward(int layer,
                                                                      ForwardCall& call) {
  if (started_ != nullptr) {
    return absl::FailedPreconditionError("forward between a backward's start and its call");
  }
  const CallShape shape = call.shape();
  const ShardLayout mine = LayoutOf(device_.rank(), shape.tokens);
  RETURN_IF_ERROR(patterns::CheckLength(options_, device_.ranks(), shape.tokens));
  RETURN_IF_ERROR(
      CheckDocuments(documents_ == nullptr ? nullptr : documents_->host.get(), mine.tokens));
  LayerStats& stats = device_.StatsOf(layer);
  stats.tiles_per_ring_step.resize(forward_.steps.size());
  stats.causal_tiles += CausalTiles(mine, options_.tile) * shape.heads;
  ++stats.calls;

  // A hop between nodes travels while the index is built. One inside a node hides behind the first
  // step, and beside the index would slow its collectives and take multiprocessors from its
  // kernels.
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::forward));
  ASSIGN_OR_RETURN(const std::unique_ptr<RingSlots> kv, call.keys().Place(forward_));
  RETURN_IF_ERROR(StartFirstHops(forward_, ring::RingLink::kOuter, *kv));
  RETURN_IF_ERROR(device_.End());
  ASSIGN_OR_RETURN(const std::shared_ptr<const LayerIndex> index, ChooseTiles(layer, shape, call));
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::forward));
  RETURN_IF_ERROR(StartFirstHops(forward_, ring::RingLink::kInner, *kv));
  RETURN_IF_ERROR(call.StartOutput(*index, mine));
  RETURN_IF_ERROR(AttendSteps(*index, shape, *kv, call));
  if (index->has_columns()) RETURN_IF_ERROR(call.AttendColumns());
  RETURN_IF_ERROR(call.Finish());
  RETURN_IF_ERROR(kv->AwaitAll());
  RETURN_IF_ERROR(device_.End());
  return index;
}

absl::StatusOr<std::shared_ptr<LayerIndex>> RingRunner::ChooseTiles(int layer,
                                                                    const CallShape& shape,
                                                                    ForwardCall& call) {
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::index));
  ASSIGN_OR_RETURN(std::shared_ptr<LayerIndex> index,
                   BuildIndex(options_, budgets_.Of(layer),
                              {.layout = LayoutOf(device_.rank(), shape.tokens),
                               .heads = shape.heads,
                               .kv_heads = shape.kv_heads,
                               .head_dim = shape.head_dim,
                               .scale = shape.scale(),
                               .documents = documents_},
                              call.ForIndex(layer)));
  RETURN_IF_ERROR(device_.End());
  return index;
}

absl::Status RingRunner::AttendSteps(const LayerIndex& index, const CallShape& shape, RingSlots& kv,
                                     ForwardCall& call) {
  for (size_t t = 0; t < forward_.steps.size(); ++t) {
    ASSIGN_OR_RETURN(const StepKeys keys, Arrive(forward_, t, shape.tokens, kv));
    if (index.has_columns()) RETURN_IF_ERROR(call.GatherColumns(keys));
    RETURN_IF_ERROR(call.Attend(keys));
  }
  return absl::OkStatus();
}

absl::Status RingRunner::StartBackward(CallKeys& keys) {
  if (started_ != nullptr) {
    return absl::FailedPreconditionError("a backward has been started and not been called");
  }
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::backward));
  ASSIGN_OR_RETURN(std::unique_ptr<RingSlots> kv, keys.Place(backward_));
  RETURN_IF_ERROR(StartFirstHops(backward_, ring::RingLink::kOuter, *kv));
  RETURN_IF_ERROR(StartFirstHops(backward_, ring::RingLink::kInner, *kv));
  RETURN_IF_ERROR(device_.End());
  started_ = std::move(kv);
  return absl::OkStatus();
}

absl::Status RingRunner::Backward(const LayerIndex& index, BackwardCall& call) {
  if (started_ == nullptr) RETURN_IF_ERROR(StartBackward(call.keys()));
  const std::unique_ptr<RingSlots> kv = std::move(started_);
  const CallShape shape = call.shape();
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::backward));
  ASSIGN_OR_RETURN(const std::unique_ptr<RingSlots> gradients, call.PlaceGradients(backward_));
  RETURN_IF_ERROR(call.StartGradients(index, LayoutOf(device_.rank(), shape.tokens)));
  // Gradients of the columns are ready before their owners' keys pass by.
  if (index.has_columns()) RETURN_IF_ERROR(call.ColumnsBackward());
  RETURN_IF_ERROR(BackwardSteps(index, shape, *kv, *gradients, call));
  RETURN_IF_ERROR(call.FinishQueries());
  RETURN_IF_ERROR(gradients->AwaitAll());
  RETURN_IF_ERROR(call.ReturnGradients(backward_, *gradients));
  RETURN_IF_ERROR(kv->AwaitAll());
  return device_.End();
}

absl::Status RingRunner::BackwardSteps(const LayerIndex& index, const CallShape& shape,
                                       RingSlots& kv, RingSlots& gradients, BackwardCall& call) {
  for (size_t t = 0; t < backward_.steps.size(); ++t) {
    const ring::RingStep& step = backward_.steps[t];
    ASSIGN_OR_RETURN(const StepKeys keys, Arrive(backward_, t, shape.tokens, kv));
    RETURN_IF_ERROR(gradients.Zero(step.grad_slot));
    RETURN_IF_ERROR(call.AttendBackward(keys, gradients.memory(step.grad_slot)));
    if (index.has_columns()) {
      RETURN_IF_ERROR(call.ScatterColumns(keys, gradients.memory(step.grad_slot)));
    }
    for (const ring::GradAction& action : step.grad_actions) {
      switch (action.kind) {
        case ring::GradAction::Kind::kAdd:
          RETURN_IF_ERROR(gradients.Add(action.to_slot, action.from_slot));
          break;
        case ring::GradAction::Kind::kHop:
          RETURN_IF_ERROR(gradients.Start(action.hop));
          break;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace ringleader::attention
