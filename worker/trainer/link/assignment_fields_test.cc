// Every field of an assignment and a plan, from the message to what the trainer works with; each
// value is another than the field's default and its neighbours'.
#include <optional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/trainer/link/assignment.h"

namespace ringleader::trainer {
namespace {

using ::testing::ElementsAre;
using Decay = optim::LearningRateSchedule::Decay;

// Six ranks: two groups of three that share sequences of 768 or 384 tokens.
v1::TrainerAssignment Assignment() {
  v1::TrainerAssignment assignment;
  assignment.set_job("uid-7");
  assignment.set_job_uid("uid-7-created-first");
  assignment.set_attempt(3);
  assignment.set_rank(5);
  assignment.set_world_size(6);
  assignment.set_ranks_per_node(2);
  assignment.set_threads(9);
  assignment.set_checkpoint_step(40);
  v1::JobSpec* spec = assignment.mutable_spec();
  spec->set_name("tiny");
  spec->mutable_model()->set_config("/models/config.json");
  spec->mutable_model()->set_init("/models/start");
  v1::DataSpec* data = spec->mutable_data();
  data->set_train("/data/train");
  data->set_eval("/data/eval");
  data->set_sequence_length(768);
  data->set_batching(v1::DataSpec::SAMPLES);
  data->set_overlong(v1::DataSpec::DROP);
  data->set_dealing(v1::DataSpec::IN_ORDER);
  v1::ParallelismSpec* parallelism = spec->mutable_parallelism();
  parallelism->set_context(3);
  parallelism->set_data(2);
  v1::AttentionSpec* attention = spec->mutable_attention();
  attention->set_pattern(v1::AttentionSpec::DENSE);
  attention->set_tile(64);
  v1::TrainingSpec* training = spec->mutable_training();
  training->set_steps(100);
  training->set_global_batch(2);
  training->set_learning_rate(3e-4);
  training->set_min_learning_rate(2e-5);
  training->set_warmup_steps(4);
  training->set_schedule(v1::TrainingSpec::LINEAR);
  training->set_weight_decay(0.25);
  training->set_beta1(0.75);
  training->set_beta2(0.875);
  training->set_epsilon(1e-5);
  training->set_clip_norm(0.5);
  training->set_seed(11);
  training->set_eval_every_steps(12);
  training->set_eval_sequences(13);
  training->set_max_skipped_steps(14);
  spec->mutable_checkpoint()->set_directory("/checkpoints");
  spec->mutable_checkpoint()->set_every_steps(15);
  spec->mutable_checkpoint()->set_keep_last(16);
  spec->mutable_resources()->set_trainers(6);
  spec->mutable_resources()->set_transfer_timeout_seconds(17);
  return assignment;
}

TrainingJob JobOf(const v1::TrainerAssignment& assignment) {
  auto job = ToTrainingJob(assignment);
  EXPECT_TRUE(job.ok()) << job.status();
  return job.ok() ? *std::move(job) : TrainingJob();
}

TEST(AssignmentFieldsTest, WhoTheRankIs) {
  const TrainingJob job = JobOf(Assignment());
  EXPECT_EQ(job.name, "uid-7");
  EXPECT_EQ(job.uid, "uid-7-created-first");
  EXPECT_EQ(job.attempt, 3u);
  EXPECT_EQ(job.rank, 5);
  EXPECT_EQ(job.world_size, 6);
  EXPECT_EQ(job.ranks_per_node, 2);
  EXPECT_EQ(job.context, 3);
  EXPECT_EQ(job.data, 2);
  EXPECT_EQ(job.threads, 9);
  EXPECT_EQ(job.attention.threads, 9);
  EXPECT_EQ(job.engine, Engine::kCpu);
  EXPECT_EQ(job.transfer_timeout_seconds, 17);
  EXPECT_EQ(job.checkpoint_step, 40u);
}

TEST(AssignmentFieldsTest, WhatItTrainsOn) {
  const TrainingJob job = JobOf(Assignment());
  EXPECT_EQ(job.model_config, "/models/config.json");
  EXPECT_EQ(job.model_init, "/models/start");
  EXPECT_EQ(job.train_data, "/data/train");
  EXPECT_EQ(job.eval_data, "/data/eval");
  EXPECT_EQ(job.sequence_length, 768u);
  EXPECT_EQ(job.attention.sequence_length, 768);
  EXPECT_TRUE(job.batching.samples);
  EXPECT_EQ(job.batching.overlong, data::Overlong::kDrop);
  EXPECT_TRUE(job.deals_in_order);
  v1::TrainerAssignment by_cost = Assignment();
  by_cost.mutable_spec()->mutable_data()->clear_dealing();
  EXPECT_FALSE(JobOf(by_cost).deals_in_order);
  EXPECT_EQ(job.plan_bytes, Assignment().plan().SerializeAsString());
  v1::AttentionSpec* const sparse = by_cost.mutable_spec()->mutable_attention();
  sparse->set_pattern(v1::AttentionSpec::VERTICAL_SLASH);
  sparse->set_dense_below(2048);
  EXPECT_EQ(JobOf(by_cost).attention.dense_below, 2048);
  EXPECT_EQ(job.steps, 100u);
  EXPECT_EQ(job.global_batch, 2u);
  EXPECT_EQ(job.seed, 11u);
  EXPECT_EQ(job.eval_every_steps, 12u);
  EXPECT_EQ(job.eval_sequences, 13u);
  EXPECT_EQ(job.max_skipped_steps, 14u);
  EXPECT_EQ(job.checkpoint_directory, "/checkpoints");
  EXPECT_EQ(job.checkpoint_every_steps, 15u);
  EXPECT_EQ(job.keep_last, 16);
  EXPECT_FALSE(job.export_bf16);
  EXPECT_FALSE(job.deterministic);
  EXPECT_FALSE(job.attention.deterministic);
  EXPECT_FALSE(job.attention.bf16_gradients);
}

TEST(AssignmentFieldsTest, WhatBecomesOfLongDocumentsAndOfEvaluations) {
  v1::TrainerAssignment assignment = Assignment();
  v1::JobSpec* const spec = assignment.mutable_spec();
  for (const auto& [overlong, expected] : {std::pair{v1::DataSpec::REFUSE, data::Overlong::kRefuse},
                                           {v1::DataSpec::SPLIT, data::Overlong::kSplit},
                                           {v1::DataSpec::DROP, data::Overlong::kDrop}}) {
    spec->mutable_data()->set_overlong(overlong);
    EXPECT_EQ(JobOf(assignment).batching.overlong, expected);
  }
  spec->mutable_data()->clear_overlong();
  EXPECT_EQ(JobOf(assignment).batching.overlong, data::Overlong::kRefuse);
  EXPECT_EQ(JobOf(assignment).eval_attention, EvalAttention::kSame);
  for (const auto& [attention, expected] : {std::pair{v1::TrainingSpec::SAME, EvalAttention::kSame},
                                            {v1::TrainingSpec::DENSE, EvalAttention::kDense},
                                            {v1::TrainingSpec::BOTH, EvalAttention::kBoth}}) {
    spec->mutable_training()->set_eval_attention(attention);
    EXPECT_EQ(JobOf(assignment).eval_attention, expected);
  }
}

TEST(AssignmentFieldsTest, WhatTheModelIsExportedAs) {
  v1::TrainerAssignment assignment = Assignment();
  v1::CheckpointSpec* const checkpoint = assignment.mutable_spec()->mutable_checkpoint();
  checkpoint->set_export_type(v1::CheckpointSpec::BFLOAT16);
  EXPECT_TRUE(JobOf(assignment).export_bf16);
  checkpoint->set_export_type(v1::CheckpointSpec::FLOAT32);
  EXPECT_FALSE(JobOf(assignment).export_bf16);
}

TEST(AssignmentFieldsTest, WhatProductsRead) {
  v1::TrainerAssignment assignment = Assignment();
  EXPECT_EQ(JobOf(assignment).precision, model::Precision::kModelType) << "of older jobs";
  v1::TrainingSpec* const training = assignment.mutable_spec()->mutable_training();
  training->set_precision(v1::TrainingSpec::FP8);
  EXPECT_EQ(JobOf(assignment).precision, model::Precision::kFp8);
  EXPECT_EQ(JobOf(assignment).first_cast_step, TrainingJob().first_cast_step);
  EXPECT_EQ(JobOf(assignment).last_cast_step, TrainingJob().last_cast_step);
  training->set_fp8_first_step(20);
  training->set_fp8_last_step(80);
  EXPECT_EQ(JobOf(assignment).first_cast_step, 20u);
  EXPECT_EQ(JobOf(assignment).last_cast_step, 80u);
  training->set_precision(v1::TrainingSpec::BFLOAT16);
  EXPECT_EQ(JobOf(assignment).precision, model::Precision::kModelType);
}

TEST(AssignmentFieldsTest, HowItUpdates) {
  v1::TrainerAssignment assignment = Assignment();
  const TrainingJob job = JobOf(assignment);
  EXPECT_EQ(job.schedule.decay, Decay::kLinear);
  EXPECT_EQ(job.schedule.peak, 3e-4);
  EXPECT_EQ(job.schedule.minimum, 2e-5);
  EXPECT_EQ(job.schedule.warmup_steps, 4);
  EXPECT_EQ(job.schedule.total_steps, 100);
  EXPECT_EQ(job.adamw.weight_decay, 0.25);
  EXPECT_EQ(job.adamw.beta1, 0.75);
  EXPECT_EQ(job.adamw.beta2, 0.875);
  EXPECT_EQ(job.adamw.epsilon, 1e-5);
  EXPECT_EQ(job.adamw.clip_norm, 0.5);
  for (const auto& [schedule, decay] : {std::pair{v1::TrainingSpec::CONSTANT, Decay::kConstant},
                                        {v1::TrainingSpec::COSINE, Decay::kCosine}}) {
    assignment.mutable_spec()->mutable_training()->set_schedule(schedule);
    EXPECT_EQ(JobOf(assignment).schedule.decay, decay);
  }
}

TEST(AssignmentFieldsTest, EnginesAndRecomputePolicies) {
  v1::TrainerAssignment assignment = Assignment();
  v1::ResourcesSpec* resources = assignment.mutable_spec()->mutable_resources();
  resources->set_engine(v1::ResourcesSpec::CUDA);
  EXPECT_EQ(JobOf(assignment).engine, Engine::kCuda);
  for (const auto& [policy, expected] :
       {std::pair{v1::ResourcesSpec::NONE, model::Recompute::kNone},
        {v1::ResourcesSpec::FULL, model::Recompute::kFull}}) {
    resources->set_recompute(policy);
    EXPECT_EQ(JobOf(assignment).memory.recompute, expected);
  }
}

TEST(AssignmentFieldsTest, WhatIsLeftOpenIsOneOrTheDefault) {
  v1::TrainerAssignment assignment = Assignment();
  assignment.clear_threads();
  assignment.clear_ranks_per_node();
  assignment.clear_checkpoint_step();
  assignment.mutable_spec()->mutable_resources()->clear_transfer_timeout_seconds();
  const TrainingJob job = JobOf(assignment);
  EXPECT_EQ(job.threads, 1);
  EXPECT_EQ(job.ranks_per_node, 1);
  EXPECT_EQ(job.checkpoint_step, 0u);
  EXPECT_EQ(job.transfer_timeout_seconds, TrainingJob().transfer_timeout_seconds);
  EXPECT_EQ(job.plan.effective_step, 1u);
  EXPECT_EQ(job.plan.ring.kind, ring::RingKind::kFlat);
  EXPECT_EQ(job.plan.ring.inner, 3);
  EXPECT_EQ(job.plan.ring.outer, 1);
  EXPECT_EQ(job.plan.layout, kernels::LayoutKind::kStriped);
}

TEST(AssignmentFieldsTest, ARankIsOneOfTheAttempts) {
  v1::TrainerAssignment assignment = Assignment();
  assignment.set_rank(6);
  EXPECT_EQ(ToTrainingJob(assignment).status().message(),
            "rank 6 of 6 ranks does not fit parallelism.context 3 * parallelism.data 2");
  assignment = Assignment();
  assignment.mutable_spec()->mutable_parallelism()->set_data(3);
  EXPECT_FALSE(ToTrainingJob(assignment).ok());
}

TEST(AssignmentFieldsTest, ThePlansRingLayoutAndStripeAreTheAttentions) {
  v1::TrainerAssignment assignment = Assignment();
  v1::StepPlan* plan = assignment.mutable_plan();
  plan->mutable_ring()->set_kind(v1::ParallelismSpec::ALL_GATHER);
  plan->set_layout(v1::ParallelismSpec::STRIPED);
  plan->set_stripe(128);
  const TrainingJob job = JobOf(assignment);
  EXPECT_EQ(job.attention.ring.kind, ring::RingKind::kAllGather);
  EXPECT_EQ(job.attention.ring.inner, 3);
  EXPECT_EQ(job.attention.stripe, 128);
  EXPECT_EQ(job.plan.stripe, 128);
  plan->set_layout(v1::ParallelismSpec::CONTIGUOUS);
  EXPECT_EQ(JobOf(assignment).attention.layout, kernels::LayoutKind::kContiguous);
}

TEST(PlanFieldsTest, AreTakenOneByOne) {
  v1::StepPlan proto;
  proto.set_version(5);
  proto.set_effective_step(9);
  proto.mutable_ring()->set_kind(v1::ParallelismSpec::HIERARCHICAL);
  proto.mutable_ring()->set_inner(2);
  proto.mutable_ring()->set_outer(3);
  proto.set_layout(v1::ParallelismSpec::ZIGZAG);
  proto.set_stripe(64);
  const Plan plan = ToPlan(proto, 6).value();
  EXPECT_EQ(plan.version, 5u);
  EXPECT_EQ(plan.effective_step, 9u);
  EXPECT_EQ(plan.ring.kind, ring::RingKind::kHierarchical);
  EXPECT_EQ(plan.ring.inner, 2);
  EXPECT_EQ(plan.ring.outer, 3);
  EXPECT_EQ(plan.layout, kernels::LayoutKind::kZigzag);
  EXPECT_EQ(plan.stripe, 64);
}

TEST(PlanFieldsTest, ARingHoldsTheContextsRanks) {
  v1::StepPlan proto;
  proto.mutable_ring()->set_inner(2);
  EXPECT_TRUE(ToPlan(proto, 2).ok()) << "one node, unless it says more";
  EXPECT_FALSE(ToPlan(proto, 4).ok());
  proto.mutable_ring()->set_outer(2);
  EXPECT_TRUE(ToPlan(proto, 4).ok());
  EXPECT_EQ(ToPlan(proto, 2).status().message(),
            "plan 0: a ring of 2 x 2 ranks for parallelism.context 2");
}

TEST(PlanFieldsTest, WhoSharesHeadsIsOneRankOfTheRing) {
  v1::StepPlan proto;
  EXPECT_EQ(ToPlan(proto, 6, 2)->ring.inner, 3);
  proto.mutable_ring()->set_inner(3);
  EXPECT_TRUE(ToPlan(proto, 6, 2).ok());
  EXPECT_EQ(ToPlan(proto, 3, 3).status().message(),
            "plan 0: a ring of 3 x 1 ranks for parallelism.context 3 and parallelism.heads 3");
  v1::TrainerAssignment assignment = Assignment();
  EXPECT_EQ(JobOf(assignment).attention.head_ranks, 1);
  EXPECT_EQ(JobOf(assignment).attention.head_groups, 1);
  assignment.mutable_spec()->mutable_parallelism()->set_head_groups(2);
  EXPECT_EQ(JobOf(assignment).attention.head_groups, 2);
  assignment.mutable_spec()->mutable_parallelism()->clear_head_groups();
  assignment.mutable_spec()->mutable_parallelism()->set_heads(3);
  assignment.mutable_plan()->mutable_ring()->set_inner(1);
  const TrainingJob job = JobOf(assignment);
  EXPECT_EQ(job.attention.head_ranks, 3);
  EXPECT_EQ(job.ring_ranks(), 1);
  EXPECT_EQ(job.ring_rank(), 0);
  EXPECT_EQ(job.head_place().member, 2) << "of rank 5, the last of its context";
}

TEST(PlanFieldsTest, WeightsOfSamplesAscend) {
  v1::StepPlan proto;
  v1::SampleWeight* const row = proto.add_sample_weights();
  row->set_tokens(1000);
  row->set_milliseconds(2.5);
  row->set_attention_milliseconds(1.5);
  row->set_travel_milliseconds(0.5);
  EXPECT_EQ(ToPlan(proto, 1)->sample_weights.TravelMicroseconds(1000), 500);
  EXPECT_EQ(ToPlan(proto, 1)->sample_weights.Microseconds(1000), 2500);
  EXPECT_EQ(ToPlan(proto, 1)->sample_weights.AttentionMicroseconds(1000), 1500);
  *proto.add_sample_weights() = *row;
  EXPECT_FALSE(ToPlan(proto, 1).ok());
}

// Each step has the weights that dealt it first.
TEST(PlanFieldsTest, WeightsHaveAHistory) {
  v1::StepPlan proto;
  const auto weigh = [](double milliseconds, auto* rows) {
    v1::SampleWeight* const row = rows->Add();
    row->set_tokens(1000);
    row->set_milliseconds(milliseconds);
  };
  weigh(7, proto.mutable_sample_weights());
  EXPECT_EQ(ToPlan(proto, 1)->WeightsAt(1).Microseconds(1000), 7000);
  proto.set_weights_from_step(50);
  for (const uint64_t from : {10, 30}) {
    v1::EarlierWeights* const earlier = proto.add_earlier_weights();
    earlier->set_from_step(from);
    weigh(static_cast<double>(from) / 10, earlier->mutable_sample_weights());
  }
  const auto plan = ToPlan(proto, 1);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const auto& [step, microseconds] :
       {std::pair{1, 1000}, {10, 1000}, {29, 1000}, {30, 3000}, {49, 3000}, {50, 7000}}) {
    EXPECT_EQ(plan->WeightsAt(step).Microseconds(1000), microseconds) << step;
  }
  proto.mutable_earlier_weights(0)->mutable_sample_weights(0)->set_milliseconds(-1);
  EXPECT_FALSE(ToPlan(proto, 1).ok());
}

TEST(PlanFieldsTest, ShapesAndSpeedsOfGroupsHaveAHistory) {
  v1::StepPlan proto;
  proto.set_layout(v1::ParallelismSpec::DOCUMENTS);
  proto.set_stripe(64);
  proto.set_shape_from_step(40);
  v1::EarlierShape* const earlier = proto.add_earlier_shapes();
  earlier->set_from_step(1);
  earlier->set_layout(v1::ParallelismSpec::ZIGZAG);
  earlier->mutable_ring()->set_kind(v1::ParallelismSpec::HIERARCHICAL);
  earlier->mutable_ring()->set_inner(2);
  earlier->mutable_ring()->set_outer(3);
  v1::EarlierShape* const later = proto.add_earlier_shapes();
  later->set_from_step(20);
  later->set_layout(v1::ParallelismSpec::CONTIGUOUS);
  proto.set_weights_from_step(30);
  proto.add_group_permille(1000);
  proto.add_group_permille(800);
  v1::EarlierWeights* const weights = proto.add_earlier_weights();
  weights->set_from_step(20);
  weights->add_group_permille(700);
  const auto plan = ToPlan(proto, 6);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->ShapeAt(20).layout, kernels::LayoutKind::kContiguous);
  EXPECT_EQ(plan->ShapeAt(39).layout, kernels::LayoutKind::kContiguous);
  for (const uint64_t step : {1, 19}) {
    const PlanShape& shape = plan->ShapeAt(step);
    EXPECT_EQ(shape.layout, kernels::LayoutKind::kZigzag);
    EXPECT_EQ(shape.ring.kind, ring::RingKind::kHierarchical);
    EXPECT_EQ(shape.ring.inner, 2);
    EXPECT_EQ(shape.ring.outer, 3);
    EXPECT_FALSE(shape.by_documents);
  }
  EXPECT_TRUE(plan->ShapeAt(40).by_documents);
  EXPECT_EQ(plan->ShapeAt(40).stripe, 64);
  EXPECT_EQ(plan->ShapeAt(40).ring.inner, 6);
  EXPECT_THAT(plan->GroupPermilleAt(29), ElementsAre(700u));
  EXPECT_THAT(plan->GroupPermilleAt(30), ElementsAre(1000u, 800u));
  earlier->mutable_ring()->set_inner(4);
  EXPECT_FALSE(ToPlan(proto, 6).ok()) << "a ring of 4 x 3";
}

TEST(AssignmentFieldsTest, WhatIsToBeMeasured) {
  v1::MeasureRequest request;
  request.set_budget_milliseconds(2500);
  const auto fill = [](const std::string& name, v1::MachineKind* machine) {
    machine->set_device(name);
    machine->set_clocks(name + " clocks");
    machine->set_driver(name + " driver");
    machine->set_build(name + " build");
  };
  fill("layers", request.add_known_layers());
  fill("inside", request.add_known_links_inside());
  fill("between", request.add_known_links_between());
  const balance::MeasureRequest result = ToMeasureRequest(request);
  EXPECT_EQ(result.budget_seconds, 2.5);
  const auto machine = [](const std::string& name) {
    return balance::MachineKind{name, name + " clocks", name + " driver", name + " build"};
  };
  EXPECT_THAT(result.known_layers, ElementsAre(machine("layers")));
  EXPECT_THAT(result.known_links_inside, ElementsAre(machine("inside")));
  EXPECT_THAT(result.known_links_between, ElementsAre(machine("between")));
}

}  // namespace
}  // namespace ringleader::trainer
