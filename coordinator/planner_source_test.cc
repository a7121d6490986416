#include "coordinator/planner_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "base/testing/temp_dir.h"
#include "coordinator/testing/plan_request.h"
#include "jobspec/jobspec.h"
#include "proto/timestamps.h"

namespace ringleader {
namespace {

using ::testing::HasSubstr;
using testing::Plan;
using testing::Request;
using testing::Shape;

// What a job's reports teach reaches the prediction of its next attempt, and not the choice.
TEST(PlannerSourceTest, ReportsMakeTheNextAttemptsPredictionTruer) {
  const lifecycle::PlanRequest request = Request(4, 16384);
  v1::Job job;
  *job.mutable_spec() = request.spec;
  *job.mutable_model_shape() = Shape();
  *job.add_attempts()->add_placements() = request.placements[0];

  const auto plans = NewPlannerSource();
  const auto made = Plan(*plans, request);
  ASSERT_TRUE(made.ok()) << made.status();
  const v1::StepPlan* const first = &made->plan;
  ASSERT_GT(first->prediction().attention_seconds(), 0);
  plans->Started(job, *first, request.nodes);
  v1::StepReport report;
  for (int i = 0; i < 50; ++i) {
    report.set_step(report.step() + 1);
    report.clear_layers();
    report.set_most_tiles(20'000);
    for (uint32_t layer = 0; layer < 4; ++layer) {
      v1::LayerReport* const entry = report.add_layers();
      entry->set_layer(layer);
      entry->set_slashes(100);
      entry->set_verticals(1000);
    }
    report.mutable_phases()->set_attention_forward(100);
    report.mutable_phases()->set_attention_backward(300);
    plans->Observe(job, report);
  }
  const auto again = Plan(*plans, request);
  ASSERT_TRUE(again.ok()) << again.status();
  const v1::StepPlan* const second = &again->plan;
  EXPECT_GT(second->prediction().attention_seconds(), 5 * first->prediction().attention_seconds());
  EXPECT_NE(second->prediction().density(), first->prediction().density());
  EXPECT_EQ(second->layout(), first->layout());
  EXPECT_EQ(second->stripe(), first->stripe());
  EXPECT_EQ(second->ring().kind(), first->ring().kind());

  plans->Forget(job);
  const auto third = Plan(*plans, request);
  EXPECT_EQ(third->plan.prediction().attention_seconds(), first->prediction().attention_seconds());
}

// What an earlier coordinator had learned is learned again from its reports.
TEST(PlannerSourceTest, ARestartForgetsNothing) {
  const lifecycle::PlanRequest request = Request(4, 16384);
  v1::Job job;
  *job.mutable_spec() = request.spec;
  *job.mutable_model_shape() = Shape();
  *job.add_attempts()->add_placements() = request.placements[0];
  std::vector<v1::StepReport> reports(50);
  for (v1::StepReport& report : reports) {
    report.set_most_tiles(20'000);
    report.mutable_phases()->set_attention_forward(100);
    report.mutable_phases()->set_attention_backward(300);
  }
  const auto before = NewPlannerSource();
  const auto made = Plan(*before, request);
  ASSERT_TRUE(made.ok()) << made.status();
  before->Started(job, made->plan, request.nodes);
  for (const v1::StepReport& report : reports) before->Observe(job, report);

  const auto after = NewPlannerSource();
  after->Restored(job, made->plan, request.nodes, reports);
  const double learned = Plan(*after, request)->plan.prediction().attention_seconds();
  EXPECT_EQ(learned, Plan(*before, request)->plan.prediction().attention_seconds());
  EXPECT_GT(learned, 5 * made->plan.prediction().attention_seconds());
}

// Trainers are asked for what no table knows, and what they measured is in the next plan.
TEST(PlannerSourceTest, WhatWasMeasuredIsNotAskedForAgain) {
  const lifecycle::PlanRequest request = Request(4, 16384);
  v1::Job job;
  *job.mutable_spec() = request.spec;
  *job.mutable_model_shape() = Shape();
  const auto plans = NewPlannerSource({.measure_seconds = 20});
  EXPECT_EQ(plans->WhatToMeasure(job).budget_milliseconds(), 2000u) << "the CPU engine's tenth";
  EXPECT_TRUE(plans->WhatToMeasure(job).known_layers().empty());

  v1::Measurements measured;
  v1::LatencyTable* const layers = measured.mutable_layers();
  layers->mutable_machine()->set_device("cpu, 1 threads");
  layers->mutable_machine()->set_build("0.1.0");
  layers->mutable_shape()->set_pattern("vertical_slash");
  layers->mutable_shape()->set_tile(request.spec.attention().tile());
  layers->mutable_shape()->set_heads(4);
  layers->mutable_shape()->set_kv_heads(2);
  layers->mutable_shape()->set_head_dim(64);
  for (const uint32_t tokens : {4096, 16384}) {
    v1::LatencyRow* const row = layers->add_rows();
    row->set_tokens(tokens);
    row->set_density(1);
    row->set_p50_ms(1e-3 * tokens * tokens);
    row->set_p90_ms(row->p50_ms());
    row->set_forward_p50_ms(row->p50_ms() / 3);
  }
  ASSERT_TRUE(plans->Check(job, request.nodes[0], measured).ok())
      << plans->Check(job, request.nodes[0], measured).status();
  auto list = std::make_shared<store::MeasurementList>();
  list->tables.push_back(*layers);
  plans->Measured(list);
  ASSERT_EQ(plans->WhatToMeasure(job).known_layers_size(), 1);
  EXPECT_EQ(plans->WhatToMeasure(job).known_layers(0).build(), "0.1.0");

  layers->mutable_shape()->set_heads(8);
  EXPECT_FALSE(plans->Check(job, request.nodes[0], measured).ok());
}

// A running job that could lie better is told so, as soon as another thread has found out; not one
// whose losses are promised to the last bit.
TEST(PlannerSourceTest, ABetterLayoutIsAnnounced) {
  lifecycle::PlanRequest request = Request(4, 65536);
  request.spec.mutable_training()->set_steps(100'000);
  for (const bool may_change : {true, false}) {
    if (may_change) request.spec.mutable_parallelism()->set_replan(v1::ParallelismSpec::ALWAYS);
    if (!may_change) request.spec.mutable_parallelism()->clear_replan();
    v1::Job job;
    *job.mutable_spec() = request.spec;
    *job.mutable_model_shape() = Shape();
    *job.add_attempts()->add_placements() = request.placements[0];
    v1::JobSpec asked = request.spec;
    asked.mutable_parallelism()->set_layout(v1::ParallelismSpec::CONTIGUOUS);
    const auto plans = NewPlannerSource();
    lifecycle::PlanRequest uneven = request;
    uneven.spec = asked;
    const auto made = Plan(*plans, uneven);
    ASSERT_TRUE(made.ok()) << made.status();
    plans->Started(job, made->plan, request.nodes);
    std::optional<v1::StepPlan> next;
    v1::StepReport report;
    report.set_plan_version(made->plan.version());
    report.set_step_seconds(made->plan.prediction().step_seconds());
    constexpr uint64_t kResumedAt = 1000;
    report.set_step(kResumedAt);
    const absl::Time deadline = absl::Now() + absl::Seconds(may_change ? 60 : 1);
    while (!next.has_value() && absl::Now() < deadline) {
      report.set_step(report.step() + 1);
      SetTime(absl::Now(), report.mutable_time());
      next = plans->Observe(job, report);
      // What was found comes with a later report.
      absl::SleepFor(absl::Milliseconds(1));
    }
    ASSERT_EQ(next.has_value(), may_change);
    if (!may_change) continue;
    EXPECT_EQ(next->version(), made->plan.version() + 1);
    EXPECT_EQ(next->layout(), v1::ParallelismSpec::STRIPED);
    EXPECT_GT(next->effective_step(), report.step());
    EXPECT_GT(report.step(), kResumedAt + 16) << "an attempt's first steps are of no other";
    EXPECT_EQ(next->earlier_shapes(0).layout(), v1::ParallelismSpec::CONTIGUOUS);
    EXPECT_THAT(next->reasons(0), HasSubstr("in place of contiguous"));
  }
}

// But for jobs whose losses are promised to the last bit: what was measured between two runs would
// change the order of their sums.
TEST(PlannerSourceTest, WhatWasMeasuredIsInTheNextPlan) {
  lifecycle::PlanRequest request = Request(4, 16384);
  request.spec.mutable_resources()->set_engine(v1::ResourcesSpec::CUDA);
  for (v1::NodeInventory& node : request.nodes) {
    for (int i = 0; i < 4; ++i) {
      v1::Gpu* const gpu = node.add_gpus();
      gpu->set_model("gpu");
      gpu->set_memory_bytes(uint64_t{80} << 30);
    }
  }
  v1::LatencyTable table;
  table.mutable_machine()->set_device("gpu");
  table.mutable_shape()->set_pattern("vertical_slash");
  table.mutable_shape()->set_tile(request.spec.attention().tile());
  table.mutable_shape()->set_heads(4);
  table.mutable_shape()->set_kv_heads(2);
  table.mutable_shape()->set_head_dim(64);
  for (const uint32_t tokens : {4096, 16384}) {
    v1::LatencyRow* const row = table.add_rows();
    row->set_tokens(tokens);
    row->set_density(1);
    row->set_p50_ms(1e-3 * tokens * tokens);
    row->set_p90_ms(row->p50_ms());
    row->set_forward_p50_ms(row->p50_ms() / 3);
  }
  auto list = std::make_shared<store::MeasurementList>();
  list->tables.push_back(table);
  const auto seconds = [&](lifecycle::PlanSource& plans) {
    const auto made = Plan(plans, request);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? made->plan.prediction().attention_seconds() : 0.0;
  };
  const auto plans = NewPlannerSource();
  const double usual = seconds(*plans);
  plans->Measured(list);
  EXPECT_GT(seconds(*plans), 5 * usual);
  request.spec.mutable_training()->set_deterministic(true);
  EXPECT_EQ(seconds(*plans), usual);
  // Nor in that of its next attempt.
  v1::Job job;
  *job.mutable_spec() = request.spec;
  *job.mutable_model_shape() = Shape();
  *job.add_attempts()->add_placements() = request.placements[0];
  plans->Started(job, Plan(*plans, request)->plan, request.nodes);
  EXPECT_EQ(seconds(*plans), usual);
}

// Weights of samples follow what reports say that lengths visited, unless the job promises the same
// bits in every run; a restarted coordinator learns it again.
TEST(PlannerSourceTest, WeightsFollowTheTilesThatLengthsVisited) {
  lifecycle::PlanRequest request = Request(4, 1 << 20);
  request.spec.mutable_resources()->set_engine(v1::ResourcesSpec::CUDA);
  request.spec.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
  request.spec.mutable_training()->set_global_batch(4);
  request.spec.mutable_training()->set_steps(1000);
  v1::Job job;
  *job.mutable_spec() = request.spec;
  *job.mutable_model_shape() = Shape();
  *job.add_attempts()->add_placements() = request.placements[0];
  const auto plans = NewPlannerSource();
  const auto made = Plan(*plans, request);
  ASSERT_TRUE(made.ok()) << made.status();
  ASSERT_FALSE(made->plan.sample_weights().empty());
  const v1::SampleWeight before = *made->plan.sample_weights().rbegin();

  std::vector<v1::StepReport> reports(80);
  for (size_t i = 0; i < reports.size(); ++i) {
    reports[i].set_step(i + 1);
    SetTime(absl::Now() + absl::Hours(1), reports[i].mutable_time());  // for as long as this takes
    v1::LengthReport* const bin = reports[i].add_lengths();
    bin->set_tokens(1 << 20);
    bin->set_causal_tiles(1'000'000'000);
    bin->set_visited_tiles(static_cast<uint64_t>(5e8 * before.density()));
  }
  const auto next_of = [&](const v1::Job& of) {
    plans->Started(of, made->plan, request.nodes);
    std::optional<v1::StepPlan> next;
    for (const v1::StepReport& report : reports) {
      if (auto plan = plans->Observe(of, report)) next = std::move(plan);
    }
    return next;
  };
  const auto next = next_of(job);
  ASSERT_TRUE(next.has_value());
  EXPECT_GT(next->weights_from_step(), 64u);
  EXPECT_NEAR(next->sample_weights().rbegin()->attention_milliseconds(),
              before.attention_milliseconds() / 2, 1e-3 * before.attention_milliseconds());
  EXPECT_EQ(next->earlier_weights_size(), 1);

  const auto restarted = NewPlannerSource();
  v1::StepPlan newest = made->plan;
  (*newest.mutable_learned()->mutable_misses())["striped"] = 1.5;
  newest.mutable_learned()->set_machines(next->learned().machines());
  restarted->Restored(job, newest, request.nodes, reports);
  const auto after = restarted->Observe(job, reports.back());
  ASSERT_TRUE(after.has_value());
  EXPECT_EQ(after->learned().misses().at("striped"), 1.5);
  v1::Job elsewhere = job;
  elsewhere.mutable_attempts(0)->mutable_placements(0)->set_node("another");
  restarted->Restored(elsewhere, newest, request.nodes, reports);
  const auto anew = restarted->Observe(elsewhere, reports.back());
  ASSERT_TRUE(anew.has_value());
  EXPECT_TRUE(anew->learned().misses().empty()) << "of other machines";
  EXPECT_NE(anew->learned().machines(), next->learned().machines());

  // Of steps long before those that ranks are training now, nothing follows.
  for (v1::StepReport& report : reports) {
    SetTime(absl::Now() - absl::Hours(1), report.mutable_time());
  }
  EXPECT_FALSE(next_of(job).has_value());

  job.mutable_spec()->set_name("same-bits");
  job.mutable_spec()->mutable_training()->set_deterministic(true);
  EXPECT_FALSE(next_of(job).has_value());
}

// What ranks never took is not in force for the attempt that goes on from their checkpoint.
TEST(PlannerSourceTest, AChangeThatWasMissedIsLeftOut) {
  lifecycle::PlanRequest request = Request(4, 16384);
  const auto plans = NewPlannerSource();
  const auto first = Plan(*plans, request);
  ASSERT_TRUE(first.ok()) << first.status();
  v1::StepPlan announced = first->plan;
  announced.set_version(7);
  announced.set_effective_step(100);
  announced.set_shape_from_step(100);
  v1::EarlierShape* const before = announced.add_earlier_shapes();
  *before->mutable_ring() = first->plan.ring();
  ASSERT_EQ(first->plan.layout(), v1::ParallelismSpec::STRIPED);
  before->set_layout(first->plan.layout());
  before->set_stripe(first->plan.stripe());
  announced.set_layout(v1::ParallelismSpec::ZIGZAG);
  announced.set_stripe(0);
  announced.mutable_learned()->set_link_halvings(3);
  request.kept = announced;
  EXPECT_EQ(Plan(*plans, request)->plan.layout(), v1::ParallelismSpec::ZIGZAG);
  request.kept_was_missed = true;
  const v1::StepPlan resumed = Plan(*plans, request)->plan;
  EXPECT_EQ(resumed.layout(), v1::ParallelismSpec::STRIPED);
  EXPECT_EQ(resumed.stripe(), first->plan.stripe());
  EXPECT_EQ(resumed.earlier_shapes_size(), 0);
  EXPECT_EQ(resumed.shape_from_step(), 0u);
  EXPECT_EQ(resumed.version(), 8u);
  EXPECT_EQ(resumed.learned().link_halvings(), 3);
}

TEST(PlannerSourceTest, AJobWithoutAShapeHasItReadOnce) {
  const TempDir folder;
  std::ofstream(folder.File("config.json")) << R"({
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 257,
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 65536})";
  lifecycle::PlanRequest request = Request(4, 16384);
  request.spec.mutable_model()->set_config(folder.File("config.json"));
  request.shape.reset();
  const auto plans = NewPlannerSource();
  const auto made = Plan(*plans, request);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->shape.layers(), 4);
  EXPECT_TRUE(made->plan.has_prediction());
  request.spec.mutable_model()->set_config(folder.File("gone.json"));
  EXPECT_FALSE(Plan(*plans, request)->plan.has_prediction());
}

}  // namespace
}  // namespace ringleader
