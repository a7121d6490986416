// What plans may take, and whose turn it is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "coordinator/planner_source.h"
#include "coordinator/testing/plan_request.h"

namespace ringleader {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Plan;
using testing::Request;

// A planner that runs out of memory, or takes what it may not, fails its own job.
TEST(PlannerSourceLimitsTest, WhatThePlannerThrowsFailsOneJobAlone) {
  const auto plans =
      NewPlannerSource({.make = [](const v1::JobSpec& spec, const auto& model, const auto& cluster,
                                   const auto& costs, const auto& hints, const auto& limits,
                                   const auto* kept) -> absl::StatusOr<v1::StepPlan> {
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

TEST(PlannerSourceLimitsTest, WhatAPlanMayTakeIsSaidWithTheFieldsToChange) {
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
                  const planner::PlanLimits& limits, const auto*) -> absl::StatusOr<v1::StepPlan> {
         while (!limits.stop()) {
         }
         return absl::CancelledError("stopped");
       }});
  EXPECT_THAT(Plan(*late, Request(4, 16384)).status().message(), HasSubstr("--plan-seconds"));
}

TEST(PlannerSourceLimitsTest, PlansAreCappedInSize) {
  const auto plans =
      NewPlannerSource({.make = [](const v1::JobSpec&, const auto&, const auto&, const auto&,
                                   const auto&, const auto&, const auto*) {
        v1::StepPlan plan;
        plan.add_reasons(std::string(2 << 20, 'x'));
        return absl::StatusOr<v1::StepPlan>(plan);
      }});
  EXPECT_THAT(Plan(*plans, Request(4, 16384)).status().message(),
              AllOf(HasSubstr("at most 1048576 are"), HasSubstr("training.global_batch")));
}

// Previews wait for each other, in a short queue, and jobs do not wait for them.
TEST(PlannerSourceLimitsTest, PreviewsDoNotKeepJobsWaiting) {
  absl::Notification go;
  std::atomic<int> answered = 0, refused = 0;
  const auto plans =
      NewPlannerSource({.make = [&go](const v1::JobSpec& spec, const auto&, const auto&,
                                      const auto&, const auto&, const auto&, const auto*) {
        if (spec.name() == "preview") go.WaitForNotificationWithTimeout(absl::Seconds(60));
        return absl::StatusOr<v1::StepPlan>(v1::StepPlan());
      }});
  lifecycle::PlanRequest preview = Request(4, 16384);
  preview.spec.set_name("preview");
  preview.is_preview = true;
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
TEST(PlannerSourceLimitsTest, LongPlansDoNotKeepOthersWaiting) {
  absl::Notification go;
  std::atomic<int> made = 0;
  const auto plans =
      NewPlannerSource({.make = [&](const v1::JobSpec& spec, const auto&, const auto&, const auto&,
                                    const auto&, const auto&, const auto*) {
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

TEST(PlannerSourceLimitsTest, OwnersTakeTurns) {
  absl::Notification go, begun;
  std::vector<std::string> order;  // of one thread
  auto plans = NewPlannerSource({.make = [&](const v1::JobSpec& spec, const auto&, const auto&,
                                             const auto&, const auto&, const auto&, const auto*) {
    if (order.empty()) begun.Notify();
    order.push_back(spec.name());
    go.WaitForNotificationWithTimeout(absl::Seconds(60));
    return absl::StatusOr<v1::StepPlan>(v1::StepPlan());
  }});
  absl::BlockingCounter left(4);
  const auto plan = [&](const std::string& name, const std::string& owner) {
    lifecycle::PlanRequest request = Request(2048, 2048 * 64);
    request.spec.set_name(name);
    request.owner = owner;
    plans->Plan(request, [&](const auto&) { left.DecrementCount(); });
  };
  plan("slow", "alice");
  ASSERT_TRUE(begun.WaitForNotificationWithTimeout(absl::Seconds(60)));
  plan("slower", "alice");
  plan("slowest", "alice");
  plan("mine", "bob");
  go.Notify();
  left.Wait();
  EXPECT_THAT(order, ElementsAre("slow", "slower", "mine", "slowest"));
}

}  // namespace
}  // namespace ringleader
