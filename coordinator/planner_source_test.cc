#include "coordinator/planner_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "absl/synchronization/notification.h"
#include "base/testing/temp_dir.h"
#include "jobspec/jobspec.h"

namespace ringleader {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<lifecycle::MadePlan> Plan(lifecycle::PlanSource& plans,
                                         lifecycle::PlanRequest request) {
  struct Answer {
    absl::StatusOr<lifecycle::MadePlan> made;
    absl::Notification there;
  };
  const auto answer = std::make_shared<Answer>();
  plans.Plan(std::move(request), [answer](absl::StatusOr<lifecycle::MadePlan> made) {
    answer->made = std::move(made);
    answer->there.Notify();
  });
  if (!answer->there.WaitForNotificationWithTimeout(absl::Seconds(60))) {
    return absl::UnknownError("no answer");
  }
  return answer->made;
}

v1::ModelShape Shape() {
  v1::ModelShape shape;
  shape.set_vocab_size(257);
  shape.set_hidden_size(256);
  shape.set_intermediate_size(512);
  shape.set_layers(4);
  shape.set_heads(4);
  shape.set_kv_heads(2);
  shape.set_head_dim(64);
  return shape;
}

// `trainers` ranks in one ring on one node.
lifecycle::PlanRequest Request(uint32_t trainers, uint64_t tokens) {
  lifecycle::PlanRequest request;
  request.spec.set_name("job");
  request.spec.mutable_data()->set_sequence_length(tokens);
  request.spec.mutable_resources()->set_trainers(trainers);
  jobspec::ApplyDefaults(&request.spec);
  request.shape = Shape();
  v1::Placement& placement = request.placements.emplace_back();
  placement.set_node("nodes/a");
  placement.set_trainers(trainers);
  v1::NodeInventory& node = request.nodes.emplace_back();
  node.set_trainers(trainers);
  node.set_cpu_cores(trainers);
  node.set_memory_bytes(uint64_t{64} << 30);
  return request;
}

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
    report.clear_rank_tiles();
    report.clear_layers();
    for (int rank = 0; rank < 4; ++rank) report.add_rank_tiles(20'000);
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

// A planner that runs out of memory, or takes what it may not, fails its own job.
TEST(PlannerSourceTest, WhatThePlannerThrowsFailsOneJobAlone) {
  const auto plans =
      NewPlannerSource({.make = [](const v1::JobSpec& spec, const auto& model, const auto& cluster,
                                   const auto& costs, const auto& hints,
                                   const auto& limits) -> absl::StatusOr<v1::StepPlan> {
        if (spec.name() == "greedy") throw std::bad_alloc();
        return planner::MakePlan(spec, model, cluster, costs, hints, limits);
      }});
  lifecycle::PlanRequest greedy = Request(4, 16384);
  greedy.spec.set_name("greedy");
  const auto refused = Plan(*plans, greedy);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status().message(), HasSubstr("not enough memory to make its plan"));
  EXPECT_TRUE(Plan(*plans, Request(4, 16384)).ok());
}

TEST(PlannerSourceTest, WhatAPlanMayTakeIsSaidWithTheFieldsToChange) {
  const auto plans = NewPlannerSource();
  const auto huge = Plan(*plans, Request(65536, 65536 * 64));
  EXPECT_EQ(huge.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(huge.status().message(),
              AllOf(HasSubstr("for 65536 ranks in a ring (parallelism.context)"),
                    HasSubstr("and may take 10 s"), HasSubstr("lower parallelism.context")));
  const auto small = NewPlannerSource({.bytes = 1000});
  EXPECT_THAT(Plan(*small, Request(4, 16384)).status().message(), HasSubstr("may take 0 MiB"));
  // Estimates are not all: who takes more than was foreseen is stopped.
  const auto late = NewPlannerSource(
      {.seconds = 1e-6,
       .make = [](const v1::JobSpec&, const auto&, const auto&, const auto&, const auto&,
                  const planner::PlanLimits& limits) -> absl::StatusOr<v1::StepPlan> {
         while (!limits.stop()) {
         }
         return absl::CancelledError("stopped");
       }});
  EXPECT_THAT(Plan(*late, Request(4, 16384)).status().message(), HasSubstr("--plan-seconds"));
}

TEST(PlannerSourceTest, PlansAreCappedInSize) {
  const auto plans = NewPlannerSource({.make = [](const v1::JobSpec&, const auto&, const auto&,
                                                  const auto&, const auto&, const auto&) {
    v1::StepPlan plan;
    plan.add_reasons(std::string(2 << 20, 'x'));
    return absl::StatusOr<v1::StepPlan>(plan);
  }});
  EXPECT_THAT(Plan(*plans, Request(4, 16384)).status().message(),
              AllOf(HasSubstr("at most 1048576 are"), HasSubstr("training.global_batch")));
}

// Previews wait for each other, in a short queue, and jobs do not wait for them.
TEST(PlannerSourceTest, PreviewsDoNotKeepJobsWaiting) {
  absl::Notification go;
  const auto plans =
      NewPlannerSource({.make = [&go](const v1::JobSpec& spec, const auto&, const auto&,
                                      const auto&, const auto&, const auto&) {
        if (spec.name() == "preview") go.WaitForNotificationWithTimeout(absl::Seconds(60));
        return absl::StatusOr<v1::StepPlan>(v1::StepPlan());
      }});
  lifecycle::PlanRequest preview = Request(4, 16384);
  preview.spec.set_name("preview");
  preview.is_preview = true;
  std::atomic<int> answered = 0, refused = 0;
  for (int i = 0; i < 20; ++i) {
    plans->Plan(preview, [&](const absl::StatusOr<lifecycle::MadePlan>& made) {
      ++answered;
      if (absl::IsResourceExhausted(made.status())) ++refused;
    });
  }
  EXPECT_GE(refused, 15);
  EXPECT_LT(refused, 20);
  EXPECT_EQ(answered, refused);
  EXPECT_TRUE(Plan(*plans, Request(4, 16384)).ok());
  go.Notify();
}

// A job whose plan takes long keeps none waiting whose plan does not, nor does one that is gone.
TEST(PlannerSourceTest, LongPlansDoNotKeepOthersWaiting) {
  absl::Notification go;
  std::atomic<int> made = 0;
  const auto plans =
      NewPlannerSource({.make = [&](const v1::JobSpec& spec, const auto&, const auto&, const auto&,
                                    const auto&, const auto&) {
        ++made;
        if (spec.name() == "long") go.WaitForNotificationWithTimeout(absl::Seconds(60));
        return absl::StatusOr<v1::StepPlan>(v1::StepPlan());
      }});
  lifecycle::PlanRequest first = Request(2048, 2048 * 64), second = first;
  first.spec.set_name("long");
  const auto is_overtaken = std::make_shared<std::atomic<bool>>(false);
  second.is_overtaken = is_overtaken;
  absl::Notification ended;
  plans->Plan(first, [](const absl::StatusOr<lifecycle::MadePlan>&) {});
  plans->Plan(second, [&](const absl::StatusOr<lifecycle::MadePlan>& plan) {
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kCancelled);
    ended.Notify();
  });
  EXPECT_TRUE(Plan(*plans, Request(4, 16384)).ok());
  *is_overtaken = true;
  go.Notify();
  EXPECT_TRUE(ended.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_EQ(made, 2);
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
