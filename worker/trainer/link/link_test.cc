// The protobuf side: what a trainer makes of its worker's assignments, and the worker of its
// reports.
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/phase_fields.h"
#include "worker/trainer/link/assignment.h"
#include "worker/trainer/link/telemetry.h"
#include "worker/trainer/phase_seconds.h"

namespace ringleader::trainer {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::JobSpec Spec() {
  v1::JobSpec spec;
  spec.set_name("tiny");
  spec.mutable_model()->set_config("/models/config.json");
  spec.mutable_data()->set_train("/data/train");
  spec.mutable_data()->set_eval("/data/eval");
  spec.mutable_data()->set_sequence_length(1024);
  spec.mutable_attention()->set_pattern(v1::AttentionSpec::VERTICAL_SLASH);
  spec.mutable_attention()->set_vertical_mass(0.75);
  spec.mutable_attention()->add_dense_layers(1);
  spec.mutable_parallelism()->set_context(2);
  spec.mutable_parallelism()->set_kv_gradients(v1::ParallelismSpec::BFLOAT16);
  spec.mutable_training()->set_steps(10);
  spec.mutable_training()->set_learning_rate(3e-4);
  spec.mutable_training()->set_warmup_steps(4);
  spec.mutable_training()->set_deterministic(true);
  spec.mutable_checkpoint()->set_directory("/checkpoints");
  spec.mutable_resources()->set_trainers(2);
  return spec;
}

v1::TrainerAssignment AssignmentOf(const v1::JobSpec& spec) {
  v1::TrainerAssignment assignment;
  assignment.set_job("tiny");
  *assignment.mutable_spec() = spec;
  assignment.set_rank(1);
  assignment.set_world_size(2);
  assignment.set_threads(3);
  return assignment;
}

TEST(AssignmentTest, TakesTheJobFieldForField) {
  v1::TrainerAssignment assignment = AssignmentOf(Spec());
  v1::StepPlan* plan = assignment.mutable_plan();
  plan->mutable_ring()->set_kind(v1::ParallelismSpec::HIERARCHICAL);
  plan->mutable_ring()->set_inner(1);
  plan->mutable_ring()->set_outer(2);
  plan->set_layout(v1::ParallelismSpec::ZIGZAG);
  const TrainingJob job = ToTrainingJob(assignment).value();
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.context, 2);
  EXPECT_EQ(job.data, 1);
  EXPECT_EQ(job.sequence_length, 1024u);
  EXPECT_EQ(job.attention.pattern, patterns::Pattern::kVerticalSlash);
  EXPECT_EQ(job.attention.budget.vertical_mass, 0.75);
  EXPECT_THAT(job.attention.dense_layers, ElementsAre(1));
  EXPECT_EQ(job.attention.threads, 3);
  EXPECT_TRUE(job.attention.bf16_gradients);
  EXPECT_TRUE(job.deterministic);
  EXPECT_TRUE(job.attention.deterministic);
  EXPECT_EQ(job.plan.ring.kind, ring::RingKind::kHierarchical);
  EXPECT_EQ(job.plan.ring.outer, 2);
  EXPECT_EQ(job.plan.layout, kernels::LayoutKind::kZigzag);
  EXPECT_EQ(job.plan.effective_step, 1u);
  EXPECT_EQ(job.schedule.peak, 3e-4);
  EXPECT_EQ(job.schedule.total_steps, 10);
  EXPECT_GT(job.adamw.clip_norm, 0.0);  // a default of the job file
}

TEST(AssignmentTest, TakesWhatAGpusMemoryIsToHold) {
  v1::JobSpec spec = Spec();
  spec.mutable_resources()->set_engine(v1::ResourcesSpec::CUDA);
  TrainingJob job = ToTrainingJob(AssignmentOf(spec)).value();
  EXPECT_EQ(job.memory.recompute, std::nullopt);
  EXPECT_EQ(job.memory.offload, model::Offload::kAuto);
  spec.mutable_resources()->set_recompute(v1::ResourcesSpec::ATTENTION_ONLY);
  spec.mutable_resources()->set_offload(v1::ResourcesSpec::OFFLOAD_HOST);
  job = ToTrainingJob(AssignmentOf(spec)).value();
  EXPECT_EQ(job.memory.recompute, model::Recompute::kAttentionOnly);
  EXPECT_EQ(job.memory.offload, model::Offload::kHost);
  spec.mutable_resources()->set_offload(v1::ResourcesSpec::OFFLOAD_NONE);
  EXPECT_EQ(ToTrainingJob(AssignmentOf(spec)).value().memory.offload, model::Offload::kNone);
}

TEST(AssignmentTest, JobsFromBeforeTheDocumentMaskGoOnWithoutIt) {
  v1::TrainerAssignment assignment = AssignmentOf(Spec());
  EXPECT_FALSE(ToTrainingJob(assignment)->document_mask);
  assignment.mutable_spec()->mutable_data()->set_document_mask(true);
  EXPECT_TRUE(ToTrainingJob(assignment)->document_mask);
}

TEST(AssignmentTest, TakesTheMaskAndWhatItAsksOfTheData) {
  v1::JobSpec spec = Spec();
  spec.mutable_attention()->Clear();
  spec.mutable_attention()->set_pattern(v1::AttentionSpec::DENSE);
  TrainingJob job = ToTrainingJob(AssignmentOf(spec)).value();
  EXPECT_EQ(job.attention.mask, patterns::Mask::kCausal);  // of jobs from before there was a choice
  EXPECT_FALSE(job.batching.prefixes);
  EXPECT_EQ(job.batching.hidden_share, 0);
  spec.mutable_attention()->set_mask(v1::AttentionSpec::MASK_PREFIX_LM);
  job = ToTrainingJob(AssignmentOf(spec)).value();
  EXPECT_EQ(job.attention.mask, patterns::Mask::kPrefixLm);
  EXPECT_TRUE(job.batching.prefixes);
  spec.mutable_attention()->set_mask(v1::AttentionSpec::MASK_BLOCK_CAUSAL);
  spec.mutable_data()->set_hidden_token(9);
  job = ToTrainingJob(AssignmentOf(spec)).value();
  EXPECT_EQ(job.attention.mask, patterns::Mask::kBlockCausal);
  EXPECT_EQ(job.attention.mask_block, 1024);
  EXPECT_EQ(job.batching.hidden_share, 0.15);
  EXPECT_EQ(job.batching.hidden_token, 9u);
  spec.mutable_attention()->set_mask(static_cast<v1::AttentionSpec::Mask>(77));
  EXPECT_THAT(std::string(ToTrainingJob(AssignmentOf(spec)).status().message()),
              HasSubstr("attention.mask: enumerator 77 is unknown"));
}

TEST(AssignmentTest, RefusesRanksAndRingsThatDoNotFit) {
  v1::TrainerAssignment assignment = AssignmentOf(Spec());
  assignment.set_world_size(3);
  EXPECT_THAT(std::string(ToTrainingJob(assignment).status().message()),
              HasSubstr("parallelism.context 2"));
  assignment.set_world_size(2);
  assignment.mutable_plan()->mutable_ring()->set_inner(4);
  EXPECT_THAT(std::string(ToTrainingJob(assignment).status().message()),
              HasSubstr("a ring of 4 x 1 ranks"));
}

TEST(AssignmentTest, RefusesTokensThatWouldBeInNobodysShard) {
  v1::TrainerAssignment assignment = AssignmentOf(Spec());
  assignment.mutable_spec()->mutable_data()->set_sequence_length(1025);
  EXPECT_THAT(std::string(ToTrainingJob(assignment).status().message()),
              HasSubstr("data.sequence_length: 1025 does not divide"));
}

// A job of a newer coordinator never trains as something else: patterns and schedules, engines and
// a plan's layout and ring.
TEST(AssignmentTest, RefusesEnumeratorsThatItDoesNotKnow) {
  const auto complaint = [](const v1::TrainerAssignment& assignment) {
    return std::string(ToTrainingJob(assignment).status().message());
  };
  v1::TrainerAssignment assignment = AssignmentOf(Spec());
  assignment.mutable_spec()->mutable_attention()->set_pattern(
      static_cast<v1::AttentionSpec::Pattern>(77));
  EXPECT_THAT(complaint(assignment), HasSubstr("attention.pattern: enumerator 77 is unknown"));
  assignment = AssignmentOf(Spec());
  assignment.mutable_spec()->mutable_training()->set_schedule(
      static_cast<v1::TrainingSpec::Schedule>(78));
  EXPECT_THAT(complaint(assignment), HasSubstr("training.schedule: enumerator 78 is unknown"));
  // Also what nothing but a comparison with what is known is made of.
  assignment = AssignmentOf(Spec());
  assignment.mutable_spec()->mutable_data()->set_batching(static_cast<v1::DataSpec::Batching>(79));
  EXPECT_THAT(complaint(assignment), HasSubstr("data.batching: enumerator 79 is unknown"));
  assignment = AssignmentOf(Spec());
  assignment.mutable_plan()->set_layout(static_cast<v1::ParallelismSpec::Layout>(79));
  EXPECT_THAT(complaint(assignment), HasSubstr("parallelism.layout: enumerator 79 is unknown"));
  assignment = AssignmentOf(Spec());
  assignment.mutable_plan()->mutable_ring()->set_kind(static_cast<v1::ParallelismSpec::Ring>(80));
  EXPECT_THAT(complaint(assignment), HasSubstr("parallelism.ring: enumerator 80 is unknown"));
}

TEST(AssignmentTest, NumbersThatOverflowAreRefused) {
  v1::StepPlan proto;
  proto.mutable_ring()->set_inner(0x40000001);  // times 4 is 4 in 32 bits
  proto.mutable_ring()->set_outer(4);
  EXPECT_THAT(std::string(ToPlan(proto, 4).status().message()), HasSubstr("a ring of"));
}

TEST(TelemetryTest, StepImbalanceIsMaxOverMeanOfTheRingSteps) {
  StepRecord record;
  record.step = 4;
  record.layers.resize(2);
  record.layers[0].tiles_per_ring_step = {10, 4};
  record.layers[1].tiles_per_ring_step = {5, 1};
  const v1::StepReport report = ToProto(record, 3);
  EXPECT_EQ(report.rank(), 3);
  EXPECT_DOUBLE_EQ(report.step_imbalance(), 15.0 / 10.0);
  EXPECT_EQ(report.layers(1).tiles_per_ring_step(0), 5u);
}

TEST(TelemetryTest, EveryPhaseOfTheMessageIsReported) {
  StepRecord record;
  double seconds = 0;
  for (const auto& [name, member] : kPhases) record.phases.*member = ++seconds;
  const v1::StepReport report = ToProto(record, 0);
  size_t phases = 0;
  double expected = 0;
  ForEachPhase(report.phases(), [&](const std::string& name, double reported) {
    ASSERT_LT(phases, kPhases.size()) << name << " is missing in kPhases";
    EXPECT_EQ(name, kPhases[phases].first);
    EXPECT_EQ(reported, ++expected) << name;
    ++phases;
  });
  EXPECT_EQ(phases, kPhases.size());
}

}  // namespace
}  // namespace ringleader::trainer
