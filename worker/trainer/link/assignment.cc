#include "worker/trainer/link/assignment.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "jobspec/jobspec.h"

namespace ringleader::trainer {
namespace {

patterns::Pattern ToPattern(v1::AttentionSpec::Pattern pattern) {
  switch (pattern) {
    case v1::AttentionSpec::SLIDING_WINDOW:
      return patterns::Pattern::kSlidingWindow;
    case v1::AttentionSpec::VERTICAL_SLASH:
      return patterns::Pattern::kVerticalSlash;
    case v1::AttentionSpec::BLOCK_TOPK:
      return patterns::Pattern::kBlockTopK;
    default:
      return patterns::Pattern::kDense;
  }
}

// Fields that do not fit the pattern are unset; the options keep their own defaults there.
patterns::AttentionOptions ToAttentionOptions(const v1::AttentionSpec& spec) {
  patterns::AttentionOptions options;
  options.pattern = ToPattern(spec.pattern());
  options.select =
      spec.select() == v1::AttentionSpec::TOP_K ? patterns::Select::kTopK : patterns::Select::kTopP;
  if (spec.has_vertical_mass()) options.budget.vertical_mass = spec.vertical_mass();
  if (spec.has_slash_mass()) options.budget.slash_mass = spec.slash_mass();
  if (spec.has_max_verticals()) options.budget.max_verticals = spec.max_verticals();
  if (spec.has_max_slashes()) options.budget.max_slashes = spec.max_slashes();
  if (spec.has_estimate_queries()) options.estimate_queries = spec.estimate_queries();
  if (spec.has_sink_tokens()) options.sink_tokens = spec.sink_tokens();
  if (spec.has_local_blocks()) options.local_blocks = spec.local_blocks();
  if (spec.has_window()) options.window = spec.window();
  if (spec.has_block_size()) options.block_size = spec.block_size();
  if (spec.has_topk_blocks()) options.topk_blocks = spec.topk_blocks();
  if (spec.has_tile()) options.tile = spec.tile();
  options.dense_layers.assign(spec.dense_layers().begin(), spec.dense_layers().end());
  return options;
}

optim::LearningRateSchedule ToSchedule(const v1::TrainingSpec& spec) {
  using Decay = optim::LearningRateSchedule::Decay;
  optim::LearningRateSchedule schedule;
  schedule.decay = spec.schedule() == v1::TrainingSpec::COSINE   ? Decay::kCosine
                   : spec.schedule() == v1::TrainingSpec::LINEAR ? Decay::kLinear
                                                                 : Decay::kConstant;
  schedule.peak = spec.learning_rate();
  schedule.minimum = spec.min_learning_rate();
  schedule.warmup_steps = static_cast<int64_t>(spec.warmup_steps());
  schedule.total_steps = static_cast<int64_t>(spec.steps());
  return schedule;
}

std::optional<model::Recompute> ToRecompute(v1::ResourcesSpec::Recompute recompute) {
  switch (recompute) {
    case v1::ResourcesSpec::NONE:
      return model::Recompute::kNone;
    case v1::ResourcesSpec::ATTENTION_ONLY:
      return model::Recompute::kAttentionOnly;
    case v1::ResourcesSpec::FULL:
      return model::Recompute::kFull;
    default:
      return std::nullopt;
  }
}

model::Offload ToOffload(v1::ResourcesSpec::Offload offload) {
  switch (offload) {
    case v1::ResourcesSpec::OFFLOAD_NONE:
      return model::Offload::kNone;
    case v1::ResourcesSpec::OFFLOAD_HOST:
      return model::Offload::kHost;
    default:
      return model::Offload::kAuto;
  }
}

}  // namespace

absl::StatusOr<Plan> ToPlan(const v1::StepPlan& proto, int context) {
  Plan plan;
  plan.version = proto.version();
  plan.effective_step = std::max<uint64_t>(1, proto.effective_step());
  plan.ring.inner = context;
  if (proto.has_ring() && proto.ring().inner() != 0) {
    plan.ring.inner = static_cast<int>(proto.ring().inner());
    plan.ring.outer = static_cast<int>(std::max(1u, proto.ring().outer()));
  }
  plan.ring.kind =
      proto.ring().kind() == v1::ParallelismSpec::HIERARCHICAL ? ring::RingKind::kHierarchical
      : proto.ring().kind() == v1::ParallelismSpec::ALL_GATHER ? ring::RingKind::kAllGather
                                                               : ring::RingKind::kFlat;
  if (plan.ring.inner * plan.ring.outer != context) {
    return absl::InvalidArgumentError(
        absl::StrFormat("plan %d: a ring of %d x %d ranks for parallelism.context %d", plan.version,
                        plan.ring.inner, plan.ring.outer, context));
  }
  plan.layout = proto.layout() == v1::ParallelismSpec::CONTIGUOUS ? kernels::LayoutKind::kContiguous
                : proto.layout() == v1::ParallelismSpec::ZIGZAG   ? kernels::LayoutKind::kZigzag
                                                                  : kernels::LayoutKind::kStriped;
  plan.stripe = static_cast<int>(proto.stripe());
  for (const v1::LayerBudget& budget : proto.layer_budgets()) {
    plan.layer_budgets.push_back({.layer = budget.layer(),
                                  .budget = {.dense = budget.dense(),
                                             .vertical_mass = budget.vertical_mass(),
                                             .slash_mass = budget.slash_mass(),
                                             .max_verticals = budget.max_verticals(),
                                             .max_slashes = budget.max_slashes()}});
  }
  for (const v1::MicroBatchAssignment& assignment : proto.micro_batches()) {
    // Groups are few; a number beyond any cluster is garbage, not something to allocate for.
    if (assignment.group() > 65'535) {
      return absl::InvalidArgumentError(
          absl::StrFormat("plan %d: micro-batches for group %d", plan.version, assignment.group()));
    }
    if (plan.micro_batches.size() <= assignment.group()) {
      plan.micro_batches.resize(assignment.group() + 1);
    }
    plan.micro_batches[assignment.group()].assign(assignment.sequences().begin(),
                                                  assignment.sequences().end());
  }
  return plan;
}

absl::StatusOr<TrainingJob> ToTrainingJob(const v1::TrainerAssignment& assignment) {
  v1::JobSpec spec = assignment.spec();
  jobspec::ApplyDefaults(&spec);
  TrainingJob job;
  job.name = assignment.job();
  job.attempt = assignment.attempt();
  job.rank = static_cast<int>(assignment.rank());
  job.world_size = static_cast<int>(assignment.world_size());
  job.ranks_per_node = static_cast<int>(std::max(1u, assignment.ranks_per_node()));
  job.context = static_cast<int>(spec.parallelism().context());
  job.data = static_cast<int>(spec.parallelism().data());
  if (job.rank >= job.world_size || job.context * job.data != job.world_size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "rank %d of %d ranks does not fit parallelism.context %d * parallelism.data %d", job.rank,
        job.world_size, job.context, job.data));
  }
  job.engine = spec.resources().engine() == v1::ResourcesSpec::CUDA ? Engine::kCuda : Engine::kCpu;
  job.threads = static_cast<int>(std::max(1u, assignment.threads()));
  job.memory = {.recompute = ToRecompute(spec.resources().recompute()),
                .offload = ToOffload(spec.resources().offload())};
  if (spec.resources().has_transfer_timeout_seconds()) {
    job.transfer_timeout_seconds = static_cast<int>(spec.resources().transfer_timeout_seconds());
  }

  job.model_config = spec.model().config();
  job.model_init = spec.model().init();
  job.train_data = spec.data().train();
  job.eval_data = spec.data().eval();
  job.sequence_length = spec.data().sequence_length();
  job.sequence_lengths = jobspec::SequenceLengths(spec);
  // Tokens that are left over would be in nobody's shard. That shards are whole tiles, attention
  // checks.
  for (const uint64_t length : job.sequence_lengths) {
    if (length % static_cast<uint64_t>(job.context) != 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "data.sequence_length: %d tokens do not divide among parallelism.context %d ranks",
          length, job.context));
    }
  }
  // Jobs come with every default filled in; one without this was made before there was a choice,
  // and goes on as it began.
  job.document_mask = assignment.spec().data().document_mask();
  job.attention = ToAttentionOptions(spec.attention());
  job.attention.threads = job.threads;
  job.attention.bf16_gradients = spec.parallelism().kv_gradients() == v1::ParallelismSpec::BFLOAT16;
  ASSIGN_OR_RETURN(job.plan, ToPlan(assignment.plan(), job.context));

  const v1::TrainingSpec& training = spec.training();
  job.steps = training.steps();
  job.global_batch = training.global_batch();
  job.schedule = ToSchedule(training);
  job.adamw = {.beta1 = training.beta1(),
               .beta2 = training.beta2(),
               .epsilon = training.epsilon(),
               .weight_decay = training.weight_decay(),
               .clip_norm = training.clip_norm()};
  job.seed = training.seed();
  job.eval_every_steps = training.eval_every_steps();
  job.eval_sequences = training.eval_sequences();
  job.max_skipped_steps = training.max_skipped_steps();
  job.attention.deterministic = job.deterministic = training.deterministic();

  job.checkpoint_directory = spec.checkpoint().directory();
  job.checkpoint_every_steps = spec.checkpoint().every_steps();
  job.keep_last = static_cast<int>(spec.checkpoint().keep_last());
  job.checkpoint_step = assignment.checkpoint_step();
  return job;
}

}  // namespace ringleader::trainer
