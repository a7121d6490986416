#include "worker/trainer/step_loop.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "worker/attention/stopwatch.h"
#include "worker/trainer/memory.h"

namespace ringleader::trainer {
namespace {

using attention::Stopwatch;
using comm::Channel;

// [n] int64 over memory that `values` keeps.
torch::Tensor Tensor(std::vector<int64_t>& values) {
  return torch::from_blob(values.data(), {static_cast<int64_t>(values.size())}, torch::kInt64);
}

PhaseSeconds SplitPhases(const attention::AttentionSeconds& attention, double forward_backward) {
  PhaseSeconds phases;
  phases.index = attention.index;
  phases.attention_forward = attention.forward;
  phases.attention_backward = attention.backward;
  phases.exposed_communication = attention.exposed_communication;
  phases.linear = std::max(0.0, forward_backward - attention.index - attention.forward -
                                    attention.backward - attention.exposed_communication);
  return phases;
}

// What a plan leaves open (0) stays as the job has it.
attention::LayerBudget Merge(attention::LayerBudget budget, const attention::LayerBudget& job) {
  if (budget.vertical_mass == 0) budget.vertical_mass = job.vertical_mass;
  if (budget.slash_mass == 0) budget.slash_mass = job.slash_mass;
  if (budget.max_verticals == 0) budget.max_verticals = job.max_verticals;
  if (budget.max_slashes == 0) budget.max_slashes = job.max_slashes;
  return budget;
}

}  // namespace

StepLoop::StepLoop(const TrainingJob& job, const StepParts& parts)
    : job_(job),
      parts_(parts),
      layout_{.kind = job.plan.layout,
              .ranks = job.context,
              .rank = job.rank % job.context,
              .stripe = job.plan.stripe,
              .tokens = static_cast<int64_t>(job.sequence_length)},
      group_(static_cast<uint32_t>(job.rank / job.context)),
      plan_(job.plan) {}

absl::Status StepLoop::Apply(const Plan& plan) {
  if (plan.layout != plan_.layout || plan.stripe != plan_.stripe ||
      plan.ring.kind != plan_.ring.kind || plan.ring.inner != plan_.ring.inner ||
      plan.ring.outer != plan_.ring.outer) {
    return absl::FailedPreconditionError(
        absl::StrFormat("plan %d changes the layout or the ring of a running attempt; only budgets "
                        "and micro-batches may change",
                        plan.version));
  }
  int layers = 0;
  for (const Plan::Budget& budget : plan.layer_budgets) {
    layers = std::max(layers, static_cast<int>(budget.layer) + 1);
  }
  if (layers > parts_.decoder->config().layers) {
    return absl::InvalidArgumentError(absl::StrFormat("plan %d has a budget for layer %d of %d",
                                                      plan.version, layers - 1,
                                                      parts_.decoder->config().layers));
  }
  std::vector<attention::LayerBudget> budgets(layers, job_.attention.budget);
  for (const int layer : job_.attention.dense_layers) {
    if (layer < layers) budgets[layer].dense = true;
  }
  for (const Plan::Budget& budget : plan.layer_budgets) {
    budgets[budget.layer] = Merge(budget.budget, job_.attention.budget);
  }
  RETURN_IF_ERROR(parts_.attention->SetBudgets(budgets));
  plan_ = plan;
  return absl::OkStatus();
}

absl::StatusOr<StepRecord> StepLoop::Train(uint64_t step) {
  StepRecord record;
  record.step = step;
  record.plan_version = plan_.version;
  double data_seconds = 0;
  double forward_backward_seconds = 0;
  double optimizer_seconds = 0;
  {
    const Stopwatch whole(&record.step_seconds);
    ASSIGN_OR_RETURN(
        const std::vector<uint32_t> sequences,
        data::SequencesOfGroup(job_.global_batch, group_, job_.data, plan_.micro_batches));
    parts_.decoder->ZeroGradients();
    LossSum sum;
    for (const uint32_t sequence : sequences) {
      parts_.host->SetPlace(step, "data");
      data::LocalSequence local;
      {
        const Stopwatch timer(&data_seconds);
        local = parts_.train->Shuffled((step - 1) * job_.global_batch + sequence, layout_);
      }
      parts_.host->SetPlace(step, "forward and backward");
      const Stopwatch timer(&forward_backward_seconds);
      ASSIGN_OR_RETURN(const LossSum part, ForwardBackward(local));
      sum.loss += part.loss;
      sum.tokens += part.tokens;
    }

    parts_.host->SetPlace(step, "optimizer");
    const Stopwatch timer(&optimizer_seconds);
    RETURN_IF_ERROR(SumOverRanks(&sum));
    if (sum.tokens == 0) {
      return absl::FailedPreconditionError(
          absl::StrFormat("step %d has no token to predict; look at %s", step, job_.train_data));
    }
    // Gradients are of the sum so far; the step's loss is the mean over all ranks' tokens.
    float* gradients = parts_.decoder->gradients();
    const auto scale = static_cast<float>(1.0 / sum.tokens);
    for (int64_t i = 0; i < parts_.decoder->padded_elements(); ++i) gradients[i] *= scale;

    record.loss = sum.loss / sum.tokens;
    record.learning_rate = job_.schedule.At(static_cast<int64_t>(step) - 1);
    ASSIGN_OR_RETURN(
        const optim::OptimizerStep update,
        parts_.optimizer->Step(record.learning_rate, gradients, parts_.decoder->parameters()));
    record.gradient_norm = update.gradient_norm;
    record.skipped = update.skipped;
  }
  attention::AttentionStats stats = parts_.attention->TakeStats();
  record.phases = SplitPhases(stats.seconds, forward_backward_seconds);
  record.phases.data = data_seconds;
  record.phases.optimizer = optimizer_seconds;
  record.layers = std::move(stats.layers);
  record.tokens = job_.global_batch * job_.sequence_length;
  record.peak_memory_bytes = PeakMemoryBytes();

  skipped_in_a_row_ = record.skipped ? skipped_in_a_row_ + 1 : 0;
  if (skipped_in_a_row_ > job_.max_skipped_steps) return NonFiniteGradient(step);
  return record;
}

absl::StatusOr<StepLoop::LossSum> StepLoop::ForwardBackward(const data::LocalSequence& sequence) {
  data::LocalSequence local = sequence;
  const torch::Tensor hidden =
      parts_.decoder->Forward(Tensor(local.tokens), Tensor(local.positions),
                              static_cast<int64_t>(job_.sequence_length), *parts_.attention);
  const model::TokenLoss loss = parts_.decoder->Loss(hidden, Tensor(local.labels));
  if (loss.sum.requires_grad()) loss.sum.backward();
  return LossSum{.loss = loss.sum.item<double>(), .tokens = static_cast<double>(loss.tokens)};
}

absl::Status StepLoop::SumOverRanks(LossSum* sum) {
  double values[2] = {sum->loss, sum->tokens};
  RETURN_IF_ERROR(parts_.world->AllReduceSum(Channel::kControl, values, 2));
  *sum = {.loss = values[0], .tokens = values[1]};
  return absl::OkStatus();
}

absl::StatusOr<EvalRecord> StepLoop::Evaluate(uint64_t step) {
  parts_.host->SetPlace(step, "evaluation");
  EvalRecord record{.step = step};
  {
    const Stopwatch whole(&record.seconds);
    const torch::NoGradGuard no_grad;
    const auto sequences =
        static_cast<uint32_t>(std::min<uint64_t>(job_.eval_sequences, parts_.eval->sequences()));
    LossSum sum;
    for (uint32_t s = group_; s < sequences; s += job_.data) {
      ASSIGN_OR_RETURN(const LossSum part, ForwardBackward(parts_.eval->InOrder(s, layout_)));
      sum.loss += part.loss;
      sum.tokens += part.tokens;
    }
    RETURN_IF_ERROR(SumOverRanks(&sum));
    record.loss = sum.tokens == 0 ? std::nan("") : sum.loss / sum.tokens;
    record.tokens = static_cast<uint64_t>(sum.tokens);
  }
  parts_.attention->TakeStats();  // what evaluation visited is not the next step's load
  return record;
}

absl::Status StepLoop::NonFiniteGradient(uint64_t step) {
  // Each rank's first parameter with a bad gradient, so that all ranks report the same culprit.
  const auto& slots = parts_.decoder->layout().slots;
  const float* gradients = parts_.decoder->gradients();
  int64_t bad = -1;
  for (size_t s = 0; s < slots.size() && bad < 0; ++s) {
    const float* begin = gradients + slots[s].offset;
    const bool finite = std::all_of(begin, begin + slots[s].elements,
                                    [](float value) { return std::isfinite(value); });
    if (!finite) bad = static_cast<int64_t>(s);
  }
  std::vector<int64_t> by_rank(parts_.world->size());
  RETURN_IF_ERROR(parts_.world->AllGather(Channel::kControl, &bad, sizeof(bad), by_rank.data()));
  const auto rank = std::find_if(by_rank.begin(), by_rank.end(), [](int64_t b) { return b >= 0; });
  const std::string where =
      rank == by_rank.end()
          ? "its norm overflows"
          : absl::StrFormat("rank %d, %s", rank - by_rank.begin(), slots[*rank].name);
  return absl::FailedPreconditionError(absl::StrFormat(
      "step %d: the gradient is NaN or infinite (%s), as in the %d steps before it; lower "
      "training.learning_rate, raise training.warmup_steps or look at the data",
      step, where, skipped_in_a_row_ - 1));
}

}  // namespace ringleader::trainer
