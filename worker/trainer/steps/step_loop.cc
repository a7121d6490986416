#include "worker/trainer/steps/step_loop.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "balance/document_dealing.h"
#include "base/process/progress.h"
#include "base/status_macros.h"
#include "patterns/check_options.h"
#include "patterns/pattern.h"
#include "patterns/probe.h"
#include "ring/division.h"
#include "ring/document_layout.h"
#include "worker/attention/stats/stopwatch.h"
#include "worker/trainer/steps/deal/dealt_step.h"
#include "worker/trainer/steps/deal/group_moves.h"
#include "worker/trainer/steps/eval_sums.h"

namespace ringleader::trainer {
namespace {

using attention::Stopwatch;
using comm::Channel;

}  // namespace

StepLoop::StepLoop(const TrainingJob& job, const StepParts& parts)
    : job_(job),
      parts_(parts),
      group_(static_cast<uint32_t>(job.rank / job.context)),
      plan_(job.plan),
      shape_(job.plan) {}

kernels::ShardLayout StepLoop::LayoutOf(uint64_t tokens) const {
  return {.kind = shape_.layout,
          .ranks = job_.ring_ranks(),
          .rank = job_.ring_rank(),
          .stripe = stripe(),
          .tokens = static_cast<int64_t>(tokens)};
}

absl::StatusOr<data::LocalSequence> StepLoop::Read(const data::Loader& loader,
                                                   std::span<const data::Sample> samples,
                                                   const balance::MicroBatch& batch,
                                                   const balance::SampleWeights& weights) const {
  const std::vector<data::Sample> together = SamplesOf(batch, samples);
  if (!shape_.by_documents) {
    return loader.Read(together, LayoutOf(static_cast<uint64_t>(batch.padded)), job_.head_place());
  }
  ASSIGN_OR_RETURN(ring::DocumentLayout layout, Lay(loader, together, batch.padded, weights));
  data::LocalSequence local =
      loader.Read(together, batch.padded, layout.Positions(job_.rank % job_.context));
  local.layout = std::make_shared<const ring::DocumentLayout>(std::move(layout));
  return local;
}

absl::StatusOr<ring::DocumentLayout> StepLoop::Lay(const data::Loader& loader,
                                                   std::span<const data::Sample> samples,
                                                   int64_t padded,
                                                   const balance::SampleWeights& weights) const {
  const bool is_apart = patterns::AreApart(shape_.Of(job_.attention));
  int64_t tokens = padded;
  if (is_apart) {  // ranks are filled up one by one
    tokens = 0;
    for (const data::Sample& sample : samples) tokens += static_cast<int64_t>(sample.tokens);
  }
  const std::vector<int64_t> firsts = loader.DocumentFirsts(samples, tokens);
  std::vector<int64_t> lengths;
  for (size_t i = 0; i < firsts.size(); ++i) {
    lengths.push_back((i + 1 < firsts.size() ? firsts[i + 1] : tokens) - firsts[i]);
  }
  const auto deal = is_apart ? balance::DealDocumentsApart : balance::DealDocuments;
  const auto create = is_apart ? ring::DocumentLayout::CreateApart : ring::DocumentLayout::Create;
  return create(tokens, firsts, deal(lengths, job_.context, stripe(), weights).holders,
                job_.context, stripe());
}

absl::StatusOr<uint64_t> StepLoop::CountPadding(const balance::Dealing& dealing,
                                                std::span<const data::Sample> samples,
                                                const balance::SampleWeights& weights) const {
  if (!patterns::AreApart(shape_.Of(job_.attention))) {
    return static_cast<uint64_t>(dealing.PaddingTokens());
  }
  int64_t padding = 0;
  for (const std::vector<balance::MicroBatch>& group : dealing.groups) {
    for (const balance::MicroBatch& batch : group) {
      ASSIGN_OR_RETURN(const ring::DocumentLayout layout,
                       Lay(*parts_.train, SamplesOf(batch, samples), batch.padded, weights));
      padding += layout.local_tokens() * layout.ranks() - layout.tokens();
    }
  }
  return static_cast<uint64_t>(padding);
}

absl::Status StepLoop::CheckShape(const PlanShape& shape) const {
  patterns::AttentionOptions options = shape.Of(job_.attention);
  if (options.layout == kernels::LayoutKind::kStriped && options.stripe == 0) {
    options.stripe = options.tile;
  }
  RETURN_IF_ERROR(patterns::CheckOptions(options, job_.ring_ranks()));
  if (shape.by_documents && !job_.document_mask && !job_.batching.samples) {
    return absl::InvalidArgumentError(
        "documents cannot lie by themselves where tokens attend to those before their own "
        "(data.document_mask: false)");
  }
  if (job_.attention.pattern != patterns::Pattern::kDense &&
      shape.by_documents != job_.attention.by_documents) {
    return absl::InvalidArgumentError(
        "a job whose pattern chooses cannot change to documents that lie by themselves or back: "
        "they would see something else");
  }
  return ring::CheckDivides("data.sequence_length", static_cast<int64_t>(job_.sequence_length),
                            patterns::DivisionOf(options, job_.ring_ranks()));
}

absl::Status StepLoop::TakeShape(uint64_t step) {
  const PlanShape& shape = plan_.ShapeAt(step);
  if (shape == shape_) return absl::OkStatus();
  parts_.host->SetPlace(step, "changing the layout");
  RETURN_IF_ERROR(parts_.engine->SetShape(shape));
  shape_ = shape;
  return absl::OkStatus();
}

absl::Status StepLoop::Apply(const Plan& plan, uint64_t trained) {
  RETURN_IF_ERROR(CheckShape(plan));
  for (const Plan::EarlierShape& earlier : plan.earlier_shapes) {
    RETURN_IF_ERROR(CheckShape(earlier.shape));
  }
  if (trained > 0 && !plan.AgreesAt(trained, plan_)) {
    return absl::FailedPreconditionError(
        absl::StrFormat("it came too late: it changes step %d, which has been trained by plan %d",
                        trained, plan_.version));
  }
  plan_ = plan;
  return absl::OkStatus();
}

absl::StatusOr<StepRecord> StepLoop::Train(uint64_t step) {
  StepEngine& engine = *parts_.engine;
  StepRecord record;
  record.step = step;
  record.plan_version = plan_.version;
  record.learning_rate = job_.schedule.At(static_cast<int64_t>(step) - 1);
  record.group = group_;
  balance::Dealing dealing;
  std::vector<float> moves;  // of this group's micro-batches
  {
    const Stopwatch whole(&record.step_seconds);
    RETURN_IF_ERROR(TakeShape(step));
    RETURN_IF_ERROR(parts_.train->folder().CheckUnchanged());
    std::vector<data::Sample> samples;
    for (uint32_t i = 0; i < job_.global_batch; ++i) {
      samples.push_back(parts_.train->Shuffled((step - 1) * job_.global_batch + i));
      record.tokens += samples.back().tokens;
    }
    dealing = DealStep(job_, shape_, samples, plan_.WeightsAt(step), plan_.GroupPermilleAt(step));
    if (job_.batching.samples) {
      record.samples = job_.global_batch;
      record.micro_batches = dealing.MicroBatches();
      record.dealt_imbalance = dealing.Imbalance();
      record.overlong = parts_.train->counts();
    }
    ASSIGN_OR_RETURN(record.padding_tokens, CountPadding(dealing, samples, plan_.WeightsAt(step)));
    engine.SetHeadBudgets(head_budgets_);
    engine.BeginStep(step);
    moves = MovesOf(dealing, samples, step);
    RETURN_IF_ERROR(AddGradients(dealing, samples, moves, &record));
    RETURN_IF_ERROR(Update(&record));
  }
  ASSIGN_OR_RETURN(EngineStats stats, engine.TakeStats());
  stats.phases.checkpoint = record.phases.checkpoint;
  stats.phases.data = record.phases.data;
  record.phases = stats.phases;
  if (job_.batching.samples) {
    CountMicroBatches(dealing.groups[group_], moves, stats, &record);
  }
  record.layers = std::move(stats.layers);
  KeepProbe(&record);
  RETURN_IF_ERROR(FollowProbes(step, record.layers));
  record.peak_memory_bytes = stats.peak_memory_bytes;
  record.head_bytes = stats.head_bytes;
  record.ring_bytes = stats.ring_bytes;
  RETURN_IF_ERROR(CountSkipped(record));
  return record;
}

absl::Status StepLoop::AddGradients(const balance::Dealing& dealing,
                                    std::span<const data::Sample> samples,
                                    const std::vector<float>& moves, StepRecord* record) {
  StepEngine& engine = *parts_.engine;
  const balance::SampleWeights& weights = plan_.WeightsAt(record->step);
  const std::vector<balance::MicroBatch>& mine = dealing.groups[group_];
  for (size_t i = 0; i < mine.size(); ++i) {
    parts_.host->SetPlace(record->step, "data");
    data::LocalSequence local;
    {
      const Stopwatch timer(&record->phases.data);
      ASSIGN_OR_RETURN(local, Read(*parts_.train, samples, mine[i], weights));
    }
    record->rank_tokens += local.tokens.size();
    if (job_.document_mask || job_.batching.samples) CountDocuments(local, record);
    parts_.host->SetPlace(record->step, "forward and backward");
    RETURN_IF_ERROR(engine.ForwardBackward(local, i + 1 == mine.size(), moves[i]));
  }
  // Groups that sum their gradients once a step meet in their last micro-batch alone.
  const size_t meetings = engine.sums_once_a_step() ? 1 : dealing.MostMicroBatches();
  for (size_t i = mine.size(); i < meetings; ++i) engine.PassMicroBatch();
  return absl::OkStatus();
}

absl::Status StepLoop::Update(StepRecord* record) {
  parts_.host->SetPlace(record->step, "optimizer");
  ASSIGN_OR_RETURN(const StepUpdate update, parts_.engine->Update(record->learning_rate));
  // All that a step met may be given, e.g. a prompt that is longer than a sequence.
  record->has_labels = update.sum.tokens > 0;
  record->loss = record->has_labels ? update.sum.loss / update.sum.tokens : last_loss_;
  record->gradient_norm = record->has_labels ? update.gradient_norm : 0;
  record->skipped = update.skipped || !record->has_labels;
  last_loss_ = record->loss;
  record->phases.checkpoint = update.snapshot_seconds;
  return absl::OkStatus();
}

absl::Status StepLoop::CountSkipped(const StepRecord& record) {
  skipped_in_a_row_ = record.skipped ? skipped_in_a_row_ + 1 : 0;
  if (skipped_in_a_row_ <= job_.max_skipped_steps) return absl::OkStatus();
  if (record.has_labels) return NonFiniteGradient(record.step);
  return absl::FailedPreconditionError(
      absl::StrFormat("step %d has no token to predict, and the %d steps before it were skipped, "
                      "too; look at %s",
                      record.step, skipped_in_a_row_ - 1, job_.train_data));
}

std::vector<float> StepLoop::MovesOf(const balance::Dealing& dealing,
                                     std::span<const data::Sample> samples, uint64_t step) const {
  if (!job_.attention.balance.is_on()) {
    return std::vector<float>(dealing.groups[group_].size(), 1.0f);
  }
  std::vector<uint64_t> tokens;
  for (const data::Sample& sample : samples) tokens.push_back(sample.tokens);
  const balance::DealingRules rules = {.group_permille = plan_.GroupPermilleAt(step)};
  return GroupMoves(dealing, tokens, plan_.WeightsAt(step), group_,
                    rules.PermilleOf(static_cast<size_t>(group_)), job_.attention.balance.anchor,
                    WorthMoving(job_.attention.pattern), parts_.engine->sums_once_a_step());
}

void StepLoop::CountDocuments(const data::LocalSequence& sequence, StepRecord* record) {
  const std::vector<int64_t>& firsts = sequence.document_firsts;
  for (size_t i = 0; i < firsts.size(); ++i) {
    const int64_t end = i + 1 < firsts.size() ? firsts[i + 1] : sequence.sequence_length;
    // What fills the micro-batch up is no document.
    if (firsts[i] >= sequence.content) continue;
    ++record->documents[std::bit_ceil(static_cast<uint64_t>(end - firsts[i]))];
  }
}

void StepLoop::CountMicroBatches(const std::vector<balance::MicroBatch>& mine,
                                 const std::vector<float>& moves, const EngineStats& stats,
                                 StepRecord* record) const {
  record->group_micro_batches = mine.size();
  for (const balance::MicroBatch& batch : mine) {
    record->group_tokens += static_cast<uint64_t>(batch.padded);
  }
  // By documents several samples share a micro-batch, and none of its length says how dense it is.
  if (shape_.by_documents || patterns::DefinitionOf(job_.attention.pattern).goes_by_distance()) {
    return;
  }
  const balance::SampleWeights& weights = plan_.WeightsAt(record->step);
  for (size_t i = 0; i < mine.size(); ++i) {
    // What a moved budget visits says nothing of the length.
    if (moves[i] != 1.0f) continue;
    StepRecord::LengthRecord& of_length =
        record->lengths[weights.BinOf(static_cast<uint64_t>(mine[i].padded))];
    ++of_length.micro_batches;
    of_length.tiles.visited += stats.micro_batches[i].visited;
    of_length.tiles.causal += stats.micro_batches[i].causal;
  }
}

void StepLoop::KeepProbe(StepRecord* record) {
  std::vector<attention::LayerStats>& layers = record->layers;
  probed_recall_.resize(std::max(probed_recall_.size(), layers.size()), -1.0);
  recall_.resize(probed_recall_.size(), -1.0);
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].recall >= 0.0) recall_[i] = layers[i].recall;
    layers[i].recall = recall_[i];
    const std::vector<double>& heads = layers[i].probed_recall;
    if (heads.empty()) continue;
    probed_recall_[i] =
        std::accumulate(heads.begin(), heads.end(), 0.0) / static_cast<double>(heads.size());
  }
  record->probed_recall = probed_recall_;
}

void StepLoop::set_head_budgets(std::vector<patterns::LayerBudgets> layers) {
  if (!job_.attention.adapt_by_probe) return;
  const model::ModelConfig& config = parts_.engine->config();
  patterns::ShareBudgets(patterns::HeadsTogether(job_.attention, config.heads, config.kv_heads),
                         layers);
  head_budgets_ = std::move(layers);
}

absl::Status StepLoop::FollowProbes(uint64_t step,
                                    const std::vector<attention::LayerStats>& layers) {
  if (!job_.attention.adapt_by_probe || !patterns::ProbesAt(job_.attention, step)) {
    return absl::OkStatus();
  }
  const auto heads = static_cast<size_t>(parts_.engine->config().heads);
  const auto of_model = static_cast<size_t>(parts_.engine->config().layers);
  const int together = patterns::HeadsTogether(job_.attention, parts_.engine->config().heads,
                                               parts_.engine->config().kv_heads);
  // Of each layer its heads', then its queries: whole numbers, which doubles hold exactly. All
  // ranks of a ring have the same, of which the first speaks for its group.
  std::vector<double> sums(of_model * (heads + 1));
  for (size_t i = 0; job_.rank % job_.context == 0 && i < layers.size(); ++i) {
    double* const of_layer = sums.data() + i * (heads + 1);
    std::copy(layers[i].probed_visited.begin(), layers[i].probed_visited.end(), of_layer);
    of_layer[heads] = static_cast<double>(layers[i].probed_queries);
  }
  RETURN_IF_ERROR(parts_.world->AllReduceSum(Channel::kControl, sums.data(),
                                             static_cast<int64_t>(sums.size())));
  head_budgets_.resize(of_model);
  for (size_t i = 0; i < of_model; ++i) {
    const double* const of_layer = sums.data() + i * (heads + 1);
    if (of_layer[heads] == 0) continue;  // a dense layer
    const std::vector<int64_t> visited(of_layer, of_layer + heads);
    patterns::FollowProbe(static_cast<int>(i), visited, static_cast<int64_t>(of_layer[heads]),
                          together, &head_budgets_[i]);
  }
  return absl::OkStatus();
}

absl::StatusOr<EvalRecord> StepLoop::Evaluate(uint64_t step) {
  parts_.host->SetPlace(step, "evaluation");
  RETURN_IF_ERROR(TakeShape(std::max<uint64_t>(1, step)));
  parts_.engine->SetPrecisionOf(std::max<uint64_t>(1, step));
  parts_.engine->SetHeadBudgets(head_budgets_);
  EvalRecord record{.step = step};
  {
    const Stopwatch whole(&record.seconds);
    if (job_.eval_attention != EvalAttention::kDense) {
      ASSIGN_OR_RETURN(record.outcome, EvaluateOnce(step));
    }
    if (job_.eval_attention != EvalAttention::kSame) {
      parts_.engine->SetDense(true);
      ASSIGN_OR_RETURN(record.dense, EvaluateOnce(step));
      parts_.engine->SetDense(false);
    }
    if (job_.eval_attention == EvalAttention::kDense) {
      record.outcome = *std::exchange(record.dense, std::nullopt);
    }
  }
  // What evaluation visited is not the next step's load.
  RETURN_IF_ERROR(parts_.engine->TakeStats().status());
  return record;
}

absl::StatusOr<EvalOutcome> StepLoop::EvaluateOnce(uint64_t step) {
  RETURN_IF_ERROR(parts_.eval->folder().CheckUnchanged());
  const uint64_t count = std::min<uint64_t>(job_.eval_sequences, parts_.eval->sequences());
  std::vector<data::Sample> samples;
  for (uint64_t i = 0; i < count; ++i) samples.push_back(parts_.eval->InOrder(i));
  const balance::Dealing dealing =
      DealStep(job_, shape_, samples, /*weights=*/{}, /*group_permille=*/{});
  const std::vector<balance::MicroBatch>& mine = dealing.groups[group_];
  EvalSums sums(parts_.eval->tasks());
  for (const balance::MicroBatch& batch : mine) {
    ASSIGN_OR_RETURN(
        const data::LocalSequence sequence,
        Read(*parts_.eval, samples, batch, plan_.WeightsAt(std::max<uint64_t>(1, step))));
    ASSIGN_OR_RETURN(const RankScores scores, parts_.engine->Score(sequence));
    sums.Add(sequence, scores);
    Progress::Tick();
  }
  for (size_t i = mine.size(); i < dealing.MostMicroBatches(); ++i) parts_.engine->PassScore();
  RETURN_IF_ERROR(parts_.world->AllReduceSum(Channel::kControl, sums.sums().data(),
                                             static_cast<int64_t>(sums.sums().size())));
  return sums.Outcome();
}

absl::Status StepLoop::NonFiniteGradient(uint64_t step) {
  // Each rank's first parameter with a bad gradient, so that all ranks report the same culprit.
  const int64_t bad = parts_.engine->NonFiniteParameter();
  std::vector<int64_t> by_rank(parts_.world->size());
  RETURN_IF_ERROR(parts_.world->AllGather(Channel::kControl, &bad, sizeof(bad), by_rank.data()));
  const auto rank = std::find_if(by_rank.begin(), by_rank.end(), [](int64_t b) { return b >= 0; });
  const std::string where = rank == by_rank.end()
                                ? "its norm overflows"
                                : absl::StrFormat("rank %d, %s", rank - by_rank.begin(),
                                                  parts_.engine->layout().slots[*rank].name);
  return absl::FailedPreconditionError(absl::StrFormat(
      "step %d: the gradient is NaN or infinite (%s), as in the %d steps before it; lower "
      "training.learning_rate, raise training.warmup_steps or look at the data",
      step, where, skipped_in_a_row_ - 1));
}

}  // namespace ringleader::trainer
