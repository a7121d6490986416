#include "worker/trainer/link/assignment.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "jobspec/jobspec.h"
#include "jobspec/values/attention_spec.h"
#include "jobspec/values/model_spec.h"
#include "patterns/check_options.h"

namespace ringleader::trainer {
namespace {

using Decay = optim::LearningRateSchedule::Decay;
using v1::TrainingSpec;

constexpr std::pair<TrainingSpec::Schedule, Decay> kDecays[] = {
    {TrainingSpec::CONSTANT, Decay::kConstant},
    {TrainingSpec::COSINE, Decay::kCosine},
    {TrainingSpec::LINEAR, Decay::kLinear},
};

absl::StatusOr<optim::LearningRateSchedule> ToSchedule(const TrainingSpec& spec) {
  optim::LearningRateSchedule schedule;
  ASSIGN_OR_RETURN(schedule.decay, jobspec::Convert(kDecays, spec.schedule(), "training.schedule"));
  schedule.peak = spec.learning_rate();
  schedule.minimum = spec.min_learning_rate();
  schedule.warmup_steps = static_cast<int64_t>(spec.warmup_steps());
  schedule.total_steps = static_cast<int64_t>(spec.steps());
  return schedule;
}

constexpr std::pair<v1::DataSpec::Overlong, data::Overlong> kOverlongs[] = {
    {v1::DataSpec::OVERLONG_UNSPECIFIED, data::Overlong::kRefuse},
    {v1::DataSpec::REFUSE, data::Overlong::kRefuse},
    {v1::DataSpec::SPLIT, data::Overlong::kSplit},
    {v1::DataSpec::DROP, data::Overlong::kDrop},
};

constexpr std::pair<v1::DataSpec::Dealing, bool> kDealings[] = {
    {v1::DataSpec::DEALING_UNSPECIFIED, false},
    {v1::DataSpec::BY_COST, false},
    {v1::DataSpec::IN_ORDER, true},
};

constexpr std::pair<TrainingSpec::EvalAttention, EvalAttention> kEvalAttentions[] = {
    {TrainingSpec::EVAL_ATTENTION_UNSPECIFIED, EvalAttention::kSame},
    {TrainingSpec::SAME, EvalAttention::kSame},
    {TrainingSpec::DENSE, EvalAttention::kDense},
    {TrainingSpec::BOTH, EvalAttention::kBoth},
};

constexpr std::pair<v1::CheckpointSpec::ExportType, bool> kExportsBf16[] = {
    {v1::CheckpointSpec::EXPORT_TYPE_UNSPECIFIED, false},
    {v1::CheckpointSpec::FLOAT32, false},
    {v1::CheckpointSpec::BFLOAT16, true},
};
absl::StatusOr<balance::SampleWeights> ToWeights(
    const google::protobuf::RepeatedPtrField<v1::SampleWeight>& rows) {
  std::vector<balance::SampleWeight> weights;
  for (const v1::SampleWeight& row : rows) {
    weights.push_back({.tokens = row.tokens(),
                       .milliseconds = row.milliseconds(),
                       .attention_milliseconds = row.attention_milliseconds(),
                       .travel_milliseconds = row.travel_milliseconds()});
  }
  return balance::SampleWeights::Create(std::move(weights));
}

// `Message`: StepPlan or EarlierShape.
template <typename Message>
absl::StatusOr<PlanShape> ToShape(const Message& proto, uint64_t version, int context, int heads) {
  PlanShape shape;
  shape.ring.inner = context / heads;
  if (proto.has_ring() && proto.ring().inner() != 0) {
    shape.ring.inner = static_cast<int>(proto.ring().inner());
    shape.ring.outer = static_cast<int>(std::max(1u, proto.ring().outer()));
  }
  if (proto.ring().kind() != v1::ParallelismSpec::RING_UNSPECIFIED) {
    ASSIGN_OR_RETURN(shape.ring.kind, jobspec::RingOf(proto.ring().kind()));
  }
  if (int64_t{shape.ring.inner} * shape.ring.outer * heads != context || shape.ring.inner < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("plan %d: a ring of %d x %d ranks for parallelism.context %d%s", version,
                        shape.ring.inner, shape.ring.outer, context,
                        heads > 1 ? absl::StrFormat(" and parallelism.heads %d", heads) : ""));
  }
  if (proto.layout() != v1::ParallelismSpec::LAYOUT_UNSPECIFIED) {
    ASSIGN_OR_RETURN(shape.layout, jobspec::LayoutOf(proto.layout()));
    shape.by_documents = jobspec::IsByDocuments(proto.layout());
  }
  shape.stripe = static_cast<int>(proto.stripe());
  return shape;
}

absl::Status ReadTraining(const v1::TrainingSpec& training, TrainingJob& job) {
  job.steps = training.steps();
  job.global_batch = training.global_batch();
  ASSIGN_OR_RETURN(job.schedule, ToSchedule(training));
  job.adamw = {.beta1 = training.beta1(),
               .beta2 = training.beta2(),
               .epsilon = training.epsilon(),
               .weight_decay = training.weight_decay(),
               .clip_norm = training.clip_norm()};
  job.seed = training.seed();
  job.eval_every_steps = training.eval_every_steps();
  job.eval_sequences = training.eval_sequences();
  ASSIGN_OR_RETURN(job.eval_attention, jobspec::Convert(kEvalAttentions, training.eval_attention(),
                                                        "training.eval_attention"));
  job.max_skipped_steps = training.max_skipped_steps();
  ASSIGN_OR_RETURN(job.precision, jobspec::PrecisionOf(training));
  if (training.fp8_first_step() != 0) job.first_cast_step = training.fp8_first_step();
  if (training.fp8_last_step() != 0) job.last_cast_step = training.fp8_last_step();
  job.attention.deterministic = job.deterministic = training.deterministic();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Plan> ToPlan(const v1::StepPlan& proto, int context, int heads) {
  Plan plan;
  plan.version = proto.version();
  plan.effective_step = std::max<uint64_t>(1, proto.effective_step());
  ASSIGN_OR_RETURN(static_cast<PlanShape&>(plan), ToShape(proto, plan.version, context, heads));
  plan.shape_from_step = proto.shape_from_step();
  for (const v1::EarlierShape& earlier : proto.earlier_shapes()) {
    Plan::EarlierShape& dated = plan.earlier_shapes.emplace_back();
    dated.from_step = earlier.from_step();
    ASSIGN_OR_RETURN(dated.shape, ToShape(earlier, plan.version, context, heads));
  }
  ASSIGN_OR_RETURN(plan.sample_weights, ToWeights(proto.sample_weights()));
  plan.group_permille.assign(proto.group_permille().begin(), proto.group_permille().end());
  plan.weights_from_step = proto.weights_from_step();
  for (const v1::EarlierWeights& earlier : proto.earlier_weights()) {
    Plan::EarlierWeights& dated = plan.earlier_weights.emplace_back();
    dated.from_step = earlier.from_step();
    ASSIGN_OR_RETURN(dated.weights, ToWeights(earlier.sample_weights()));
    dated.group_permille.assign(earlier.group_permille().begin(), earlier.group_permille().end());
  }
  return plan;
}

balance::MeasureRequest ToMeasureRequest(const v1::MeasureRequest& request) {
  const auto machines = [](const auto& kinds) {
    std::vector<balance::MachineKind> result;
    for (const v1::MachineKind& machine : kinds) {
      result.push_back({.device = machine.device(),
                        .clocks = machine.clocks(),
                        .driver = machine.driver(),
                        .build = machine.build()});
    }
    return result;
  };
  return {.budget_seconds = 1e-3 * request.budget_milliseconds(),
          .known_layers = machines(request.known_layers()),
          .known_links_inside = machines(request.known_links_inside()),
          .known_links_between = machines(request.known_links_between())};
}

absl::StatusOr<TrainingJob> ToTrainingJob(const v1::TrainerAssignment& assignment) {
  v1::JobSpec spec = assignment.spec();
  RETURN_IF_ERROR(jobspec::CheckEnumerators(spec));
  jobspec::ApplyDefaults(&spec);
  TrainingJob job;
  job.name = assignment.job();
  job.uid = assignment.job_uid();
  job.attempt = assignment.attempt();
  job.fencing_token = assignment.fencing_token();
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
  ASSIGN_OR_RETURN(job.memory, jobspec::MemoryWishesOf(spec.resources()));
  if (spec.resources().has_transfer_timeout_seconds()) {
    job.transfer_timeout_seconds = static_cast<int>(spec.resources().transfer_timeout_seconds());
  }

  job.model_config = spec.model().config();
  job.model_init = spec.model().init();
  job.train_data = spec.data().train();
  job.eval_data = spec.data().eval();
  job.sequence_length = spec.data().sequence_length();
  job.batching.samples = spec.data().batching() == v1::DataSpec::SAMPLES;
  ASSIGN_OR_RETURN(job.batching.overlong,
                   jobspec::Convert(kOverlongs, spec.data().overlong(), "data.overlong"));
  ASSIGN_OR_RETURN(job.deals_in_order,
                   jobspec::Convert(kDealings, spec.data().dealing(), "data.dealing"));
  job.batching.hidden_share = spec.data().hidden_share();
  job.batching.hidden_token = spec.data().hidden_token();
  // Jobs come with every default filled in; one without this was made before there was a choice,
  // and goes on as it began.
  job.document_mask = assignment.spec().data().document_mask();
  ASSIGN_OR_RETURN(job.attention, jobspec::AttentionOptionsOf(spec.attention()));
  job.batching.prefixes = job.attention.mask == patterns::Mask::kPrefixLm;
  job.attention.sequence_length = static_cast<int64_t>(job.sequence_length);
  job.attention.threads = job.threads;
  job.attention.bf16_gradients = spec.parallelism().kv_gradients() == v1::ParallelismSpec::BFLOAT16;
  job.attention.head_ranks = static_cast<int>(jobspec::HeadRanks(spec.parallelism()));
  job.attention.head_groups = static_cast<int>(jobspec::HeadGroups(spec.parallelism()));
  ASSIGN_OR_RETURN(job.plan, ToPlan(assignment.plan(), job.context, job.attention.head_ranks));
  job.plan_bytes = assignment.plan().SerializeAsString();
  job.attention = job.plan.Of(std::move(job.attention));
  // Tokens that are left over would be in nobody's shard.
  RETURN_IF_ERROR(
      jobspec::CheckSequencesDivide(spec, patterns::DivisionOf(job.attention, job.ring_ranks())));

  RETURN_IF_ERROR(ReadTraining(spec.training(), job));

  job.checkpoint_directory = spec.checkpoint().directory();
  job.checkpoint_every_steps = spec.checkpoint().every_steps();
  job.keep_last = static_cast<int>(spec.checkpoint().keep_last());
  ASSIGN_OR_RETURN(job.export_bf16, jobspec::Convert(kExportsBf16, spec.checkpoint().export_type(),
                                                     "checkpoint.export_type"));
  job.checkpoint_step = assignment.checkpoint_step();
  return job;
}

}  // namespace ringleader::trainer
