#include "worker/attention/runner/ring_runner.h"

#include <utility>

#include "base/status_macros.h"
#include "patterns/check_options.h"
#include "patterns/pattern.h"
#include "patterns/probe.h"
#include "ring/band_tiles.h"

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

absl::Status RingRunner::SetDocuments(int64_t tokens, std::span<const int64_t> firsts,
                                      int64_t padding) {
  ASSIGN_OR_RETURN(
      std::shared_ptr<const SequenceDocuments> documents,
      patterns::MakeDocuments(LayoutOf(device_.rank(), tokens / device_.ranks()), firsts, padding));
  documents_ = nullptr;
  probe_ = nullptr;
  if (documents == nullptr) return absl::OkStatus();
  const patterns::EstimateQueries queries = patterns::ChooseEstimateQueries(
      tokens, options_.estimate_queries, options_.estimate_at == patterns::EstimateAt::kSpread,
      documents.get());
  documents_ = device_.Upload(std::move(documents), queries);
  return absl::OkStatus();
}

void RingRunner::SetStep(uint64_t step) {
  step_ = step;
  probe_ = nullptr;
}

AttentionStats RingRunner::TakeStats() {
  return device_.TakeStats(forward_);
}

Step RingRunner::OwnStep(const LayerIndex& index, const AttentionCall& call) const {
  const ShardLayout mine = LayoutOf(device_.rank(), call.shape().tokens);
  return {.index = index, .mine = mine, .owner = mine};
}

absl::StatusOr<Step> RingRunner::Arrive(const ring::RingSchedule& schedule, size_t number,
                                        const Step& own, RingSlots& kv) {
  const ring::RingStep& now = schedule.steps[number];
  for (const ring::RingHop& hop : now.kv_hops) RETURN_IF_ERROR(kv.Start(hop));
  Step step = own;
  step.number = number;
  if (now.owner == schedule.rank) return step;
  RETURN_IF_ERROR(kv.AwaitContent(now.kv_slot));
  step.owner.rank = now.owner;
  step.slot = kv.memory(now.kv_slot);
  return step;
}

absl::StatusOr<std::shared_ptr<const LayerIndex>> RingRunner::Forward(AttentionCall& call) {
  if (started_ != nullptr) {
    return absl::FailedPreconditionError("forward between a backward's start and its call");
  }
  const CallShape shape = call.shape();
  const ShardLayout mine = LayoutOf(device_.rank(), shape.tokens);
  RETURN_IF_ERROR(patterns::CheckLength(options_, device_.ranks(), shape.tokens));
  RETURN_IF_ERROR(patterns::CheckDocuments(documents_ == nullptr ? nullptr : documents_->host.get(),
                                           mine.tokens));
  LayerStats& stats = device_.StatsOf(call.layer());
  stats.tiles_per_ring_step.resize(forward_.steps.size());
  stats.causal_tiles += ring::CausalTiles(mine, options_.tile) * shape.heads;
  ++stats.calls;

  // A hop between nodes travels while the index is built. One inside a node travels during the
  // first step, and beside the index would slow its collectives and take multiprocessors from its
  // kernels.
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::forward));
  ASSIGN_OR_RETURN(const std::unique_ptr<RingSlots> kv, call.PlaceKv(forward_));
  RETURN_IF_ERROR(StartFirstHops(forward_, ring::RingLink::kOuter, *kv));
  RETURN_IF_ERROR(device_.End());
  ASSIGN_OR_RETURN(const std::shared_ptr<const LayerIndex> index, ChooseTiles(call));
  const Step own = OwnStep(*index, call);
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::forward));
  RETURN_IF_ERROR(StartFirstHops(forward_, ring::RingLink::kInner, *kv));
  RETURN_IF_ERROR(call.StartOutput());
  RETURN_IF_ERROR(AttendSteps(own, *kv, call));
  if (index->has_columns()) RETURN_IF_ERROR(call.AttendColumns(own));
  RETURN_IF_ERROR(call.FinishOutput());
  RETURN_IF_ERROR(kv->AwaitAll());
  RETURN_IF_ERROR(device_.End());
  const bool is_chosen = index->pattern != kernels::TilePattern::kCausal;
  if (is_chosen && patterns::ProbesAt(options_, step_)) RETURN_IF_ERROR(Probe(call));
  return index;
}

absl::Status RingRunner::Probe(AttentionCall& call) {
  const patterns::IndexInputs inputs = InputsOf(call);
  const int64_t tokens = inputs.layout.tokens;
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::index));
  if (probe_ == nullptr || probe_tokens_ != tokens) {
    std::shared_ptr<const SequenceDocuments> documents =
        documents_ == nullptr ? nullptr : documents_->host;
    const patterns::EstimateQueries queries =
        patterns::ChooseProbeQueries(options_, tokens, step_, documents.get());
    if (documents == nullptr) {
      documents = std::make_shared<SequenceDocuments>(
          SequenceDocuments{.tokens = tokens, .firsts = {0}, .local_starts = {}});
    }
    probe_ = device_.Upload(std::move(documents), queries);
    probe_tokens_ = tokens;
  }
  patterns::VerticalSlash work = {.layout = inputs.layout,
                                  .heads = inputs.heads,
                                  .tile = options_.tile,
                                  .blocks = (tokens + options_.tile - 1) / options_.tile,
                                  .scale = inputs.scale,
                                  .queries = static_cast<int32_t>(probe_->estimate_positions.size),
                                  .documents = probe_.get()};
  RETURN_IF_ERROR(patterns::EstimateRows(work, inputs, call));
  RETURN_IF_ERROR(call.CountProbe(work));
  return device_.End();
}

patterns::IndexInputs RingRunner::InputsOf(const AttentionCall& call) const {
  const CallShape shape = call.shape();
  return {.layout = LayoutOf(device_.rank(), shape.tokens),
          .heads = shape.heads,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .scale = shape.scale(),
          .documents = documents_,
          .is_balanced = step_ > 0,
          .move = move_};
}

absl::StatusOr<std::shared_ptr<LayerIndex>> RingRunner::ChooseTiles(AttentionCall& call) {
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::index));
  ASSIGN_OR_RETURN(std::shared_ptr<LayerIndex> index,
                   patterns::BuildIndex(budgets_.Of(call.layer()), InputsOf(call), call));
  RETURN_IF_ERROR(device_.End());
  return index;
}

absl::Status RingRunner::AttendSteps(const Step& own, RingSlots& kv, AttentionCall& call) {
  for (size_t t = 0; t < forward_.steps.size(); ++t) {
    ASSIGN_OR_RETURN(const Step step, Arrive(forward_, t, own, kv));
    if (step.index.has_columns()) RETURN_IF_ERROR(call.GatherColumns(step));
    RETURN_IF_ERROR(call.Attend(step));
  }
  return absl::OkStatus();
}

absl::Status RingRunner::StartBackward(AttentionCall& call) {
  if (started_ != nullptr) {
    return absl::FailedPreconditionError("a backward has been started and not been called");
  }
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::backward));
  ASSIGN_OR_RETURN(std::unique_ptr<RingSlots> kv, call.PlaceKv(backward_));
  RETURN_IF_ERROR(StartFirstHops(backward_, ring::RingLink::kOuter, *kv));
  RETURN_IF_ERROR(StartFirstHops(backward_, ring::RingLink::kInner, *kv));
  RETURN_IF_ERROR(device_.End());
  started_ = std::move(kv);
  return absl::OkStatus();
}

absl::Status RingRunner::Backward(const LayerIndex& index, AttentionCall& call) {
  if (started_ == nullptr) RETURN_IF_ERROR(StartBackward(call));
  const std::unique_ptr<RingSlots> kv = std::move(started_);
  const Step own = OwnStep(index, call);
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::backward));
  ASSIGN_OR_RETURN(const std::unique_ptr<RingSlots> gradients, call.PlaceGradients(backward_));
  RETURN_IF_ERROR(call.StartGradients());
  // Gradients of the columns are ready before their owners' keys pass by.
  if (index.has_columns()) RETURN_IF_ERROR(call.ColumnsBackward(own));
  RETURN_IF_ERROR(BackwardSteps(own, *kv, *gradients, call));
  RETURN_IF_ERROR(call.FinishQueries());
  RETURN_IF_ERROR(gradients->AwaitAll());
  RETURN_IF_ERROR(call.ReturnGradients(backward_, *gradients));
  RETURN_IF_ERROR(kv->AwaitAll());
  return device_.End();
}

absl::Status RingRunner::BackwardSteps(const Step& own, RingSlots& kv, RingSlots& gradients,
                                       AttentionCall& call) {
  for (size_t t = 0; t < backward_.steps.size(); ++t) {
    const ring::RingStep& now = backward_.steps[t];
    ASSIGN_OR_RETURN(const Step step, Arrive(backward_, t, own, kv));
    RETURN_IF_ERROR(gradients.Zero(now.grad_slot));
    void* const slot = gradients.memory(now.grad_slot);
    RETURN_IF_ERROR(call.AttendBackward(step, slot));
    if (step.index.has_columns()) RETURN_IF_ERROR(call.ScatterColumns(step, slot));
    for (const ring::GradAction& action : now.grad_actions) {
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
