#include "coordinator/planner/live/live_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/planner/candidates.h"
#include "coordinator/planner/testing/planner_problems.h"

namespace ringleader::planner {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

class LivePlanTest : public ::testing::Test {
 protected:
  LivePlanTest() : spec_(LongJob(2, 65536)) {
    spec_.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
    spec_.mutable_parallelism()->set_data(2);
    spec_.mutable_resources()->set_trainers(4);
    spec_.mutable_training()->set_steps(1'000'000);
    plan_.set_version(1);
    plan_.set_layout(v1::ParallelismSpec::STRIPED);
    plan_.set_stripe(64);
    plan_.mutable_ring()->set_kind(v1::ParallelismSpec::FLAT);
    plan_.mutable_ring()->set_inner(2);
    for (const uint64_t tokens : {4096, 65536}) {
      v1::SampleWeight* const row = plan_.add_sample_weights();
      row->set_tokens(tokens);
      row->set_milliseconds(static_cast<double>(tokens) * 2e-3);
    }
  }

  // Trains `steps` more steps of a second under version `version` of the plan. Returns the first
  // plan that is announced, and the step of its report.
  std::optional<v1::StepPlan> Train(LivePlan* live, int steps, uint64_t version) {
    for (int i = 0; i < steps; ++i) {
      v1::StepReport report;
      report.set_step(++step_);
      report.set_step_seconds(step_seconds_);
      report.set_plan_version(version);
      report.mutable_rank_paces()->Add(paces_.begin(), paces_.end());
      if (auto next = live->Observe(report, age_, {}, {})) return next;
    }
    return std::nullopt;
  }
  static Reshaping Better(v1::ParallelismSpec::Layout layout, v1::StepPlan plan) {
    plan.set_layout(layout);
    plan.set_stripe(0);
    plan.clear_reasons();
    plan.add_reasons("better");
    return {.miss = 1, .better = std::move(plan)};
  }

  v1::JobSpec spec_;
  v1::StepPlan plan_;
  uint64_t step_ = 0;
  double step_seconds_ = 1;
  absl::Duration age_;
  std::vector<float> paces_ = {10, 10, 10, 10};
};

TEST_F(LivePlanTest, AChangeOfShapeIsDatedAndKnowsWhatWasBefore) {
  LivePlan live(spec_, plan_, nullptr, true);
  EXPECT_FALSE(Train(&live, 100, 1).has_value());
  live.TakeShape(1, Better(v1::ParallelismSpec::ZIGZAG, plan_));
  const auto next = Train(&live, 1, 1);
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->version(), 2u);
  EXPECT_EQ(next->effective_step(), 106u) << "five seconds ahead";
  EXPECT_EQ(next->shape_from_step(), 106u);
  EXPECT_EQ(next->layout(), v1::ParallelismSpec::ZIGZAG);
  ASSERT_EQ(next->earlier_shapes_size(), 1);
  EXPECT_EQ(next->earlier_shapes(0).layout(), v1::ParallelismSpec::STRIPED);
  EXPECT_EQ(next->earlier_shapes(0).stripe(), 64u);
  EXPECT_EQ(next->weights_from_step(), 0u) << "samples are dealt as before";
  EXPECT_THAT(next->reasons(), Contains("better"));
  // Nothing else is announced before ranks have taken it, and for a while after.
  live.TakeShape(2, Better(v1::ParallelismSpec::CONTIGUOUS, *next));
  EXPECT_FALSE(Train(&live, 4, 1).has_value());
  EXPECT_FALSE(Train(&live, 60, 2).has_value());
  EXPECT_TRUE(Train(&live, 10, 2).has_value());
}

// Samples in stripes weigh what a micro-batch on all ranks takes, by documents what one rank does.
TEST_F(LivePlanTest, AChangeToDocumentsAndBackBringsItsWeights) {
  LivePlan live(spec_, plan_, nullptr, true);
  Train(&live, 100, 1);
  const auto changed = [&](v1::ParallelismSpec::Layout layout, double milliseconds) {
    const v1::StepPlan now = live.plan();
    v1::StepPlan other = now;
    for (v1::SampleWeight& row : *other.mutable_sample_weights()) {
      row.set_milliseconds(static_cast<double>(row.tokens()) * milliseconds);
    }
    live.TakeShape(now.version(), Better(layout, other));
    const auto next = Train(&live, 1, now.version());
    EXPECT_TRUE(next.has_value());
    if (!next.has_value()) return 0.0;
    Train(&live, static_cast<int>(next->effective_step() - step_) - 1, now.version());
    Train(&live, 100, next->version());
    return next->sample_weights(0).milliseconds() / 4096;
  };
  EXPECT_DOUBLE_EQ(changed(v1::ParallelismSpec::DOCUMENTS, 1e-2), 1e-2);
  EXPECT_EQ(live.plan().weights_from_step(), live.plan().effective_step());
  EXPECT_DOUBLE_EQ(changed(v1::ParallelismSpec::STRIPED, 3e-3), 3e-3);
  EXPECT_DOUBLE_EQ(changed(v1::ParallelismSpec::ZIGZAG, 5e-3), 3e-3) << "they are dealt as before";
}

TEST_F(LivePlanTest, AnAttemptGoesOnFromWhatTheOneBeforeShowed) {
  LivePlan live(spec_, plan_, nullptr, true);
  Train(&live, 100, 1);
  live.TakeShape(1, {.miss = 1.4, .link_halvings = 5});
  LivePlan next(spec_, plan_, nullptr, true);
  EXPECT_TRUE(next.misses().empty());
  next.GoOnFrom(live);
  EXPECT_EQ(next.misses(), live.misses());
  EXPECT_EQ(next.link_halvings(), 5);
}

// What an attempt showed is in its newest plan, which the next coordinator has, and the cost of its
// change in the reports since.
TEST_F(LivePlanTest, ARestartedCoordinatorKnowsWhatWasLearned) {
  plan_.mutable_learned()->set_machines(7);
  LivePlan live(spec_, plan_, nullptr, true);
  Train(&live, 100, 1);
  Reshaping found = Better(v1::ParallelismSpec::ZIGZAG, plan_);
  found.miss = 1.4;
  found.link_halvings = 5;
  live.TakeShape(1, std::move(found));
  const auto next = Train(&live, 1, 1);
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->learned().machines(), 7u);

  std::vector<v1::StepReport> reports;
  for (uint64_t step = 103; step < next->effective_step() + 3; ++step) {
    v1::StepReport& report = reports.emplace_back();
    const bool is_changed = step >= next->effective_step();
    report.set_step(step);
    report.set_plan_version(is_changed ? 2 : 1);
    report.set_step_seconds(step == next->effective_step() ? 0.9 : is_changed ? 0.6 : 1);
    report.mutable_rank_paces()->Add(paces_.begin(), paces_.end());
  }
  LivePlan restarted(spec_, *next, &reports.back(), true);
  EXPECT_DOUBLE_EQ(restarted.misses().at(NameOf(plan_)), 1.4);
  EXPECT_EQ(restarted.link_halvings(), 5);
  for (const v1::StepReport& report : reports) restarted.Relearn(report);
  EXPECT_NEAR(restarted.change_costs().layout, 0.3, 1e-9);

  // What it learns is in what it announces.
  step_ = reports.back().step();
  step_seconds_ = 0.6;
  Train(&restarted, 99, 2);
  restarted.TakeShape(2, Better(v1::ParallelismSpec::CONTIGUOUS, *next));
  const auto third = Train(&restarted, 1, 2);
  ASSERT_TRUE(third.has_value());
  EXPECT_EQ(third->learned().misses_size(), 2);
  EXPECT_NEAR(third->learned().layout_change_seconds(), 0.3, 1e-9);
  EXPECT_FALSE(third->learned().has_ring_change_seconds());

  // Reports that begin after the change say nothing of its first step.
  LivePlan late(spec_, *next, &reports.back(), true);
  late.Relearn(reports.back());
  EXPECT_DOUBLE_EQ(late.change_costs().layout, 0.25 * 0.6);
}

// The step after the first of a shape tells what a step takes, not the one before.
TEST_F(LivePlanTest, WhatAChangeCostsIsLearnedFromItsFirstStep) {
  LivePlan live(spec_, plan_, nullptr, true);
  Train(&live, 100, 1);
  EXPECT_DOUBLE_EQ(live.change_costs().layout, 0.25) << "of a step, before anything is known";
  const double ring = live.change_costs().ring;
  EXPECT_GT(ring, 1) << "a step and more";
  live.TakeShape(1, Better(v1::ParallelismSpec::ZIGZAG, plan_));
  const auto zigzag = Train(&live, 1, 1);
  ASSERT_TRUE(zigzag.has_value());
  Train(&live, 4, 1);
  step_seconds_ = 0.9;
  Train(&live, 1, 2);
  EXPECT_EQ(step_, zigzag->effective_step());
  step_seconds_ = 0.6;
  Train(&live, 99, 2);
  EXPECT_NEAR(live.change_costs().layout, 0.3, 1e-9);
  EXPECT_NEAR(live.change_costs().ring, ring - 0.4, 1e-9) << "a step less long, and else unknown";
  v1::StepPlan other = *zigzag;
  other.mutable_ring()->set_kind(v1::ParallelismSpec::ALL_GATHER);
  live.TakeShape(2, Better(v1::ParallelismSpec::ZIGZAG, other));
  const auto gathered = Train(&live, 1, 2);
  ASSERT_TRUE(gathered.has_value());
  Train(&live, static_cast<int>(gathered->effective_step() - step_) - 1, 2);
  step_seconds_ = 4.6;
  Train(&live, 1, 3);
  step_seconds_ = 0.6;
  Train(&live, 1, 3);
  EXPECT_NEAR(live.change_costs().ring, 4, 1e-9);
  EXPECT_NEAR(live.change_costs().layout, 0.3, 1e-9);
}

TEST_F(LivePlanTest, WhatRanksDidNotTakeIsWithdrawnAndTheNextComesEarlier) {
  LivePlan live(spec_, plan_, nullptr, true);
  Train(&live, 100, 1);
  live.TakeShape(1, Better(v1::ParallelismSpec::ZIGZAG, plan_));
  ASSERT_EQ(Train(&live, 1, 1)->effective_step(), 106u);
  const auto withdrawal = Train(&live, 6, 1);
  ASSERT_TRUE(withdrawal.has_value());
  EXPECT_EQ(step_, 106u) << "the first report that should have been of version 2";
  EXPECT_EQ(withdrawal->version(), 3u);
  EXPECT_EQ(withdrawal->layout(), v1::ParallelismSpec::STRIPED);
  EXPECT_EQ(withdrawal->shape_from_step(), 0u);
  EXPECT_EQ(withdrawal->earlier_shapes_size(), 0);
  EXPECT_THAT(withdrawal->reasons(), Contains(HasSubstr("had not taken it by then")));
  Train(&live, 100, 3);
  live.TakeShape(3, Better(v1::ParallelismSpec::ZIGZAG, *withdrawal));
  const auto again = Train(&live, 1, 3);
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->effective_step(), step_ + 10) << "twice as far ahead";
}

TEST_F(LivePlanTest, RanksThatTakeNothingAreLeftAlone) {
  LivePlan live(spec_, plan_, nullptr, true);
  Train(&live, 100, 1);
  live.TakeShape(1, Better(v1::ParallelismSpec::ZIGZAG, plan_));
  ASSERT_TRUE(Train(&live, 1, 1).has_value());
  ASSERT_TRUE(Train(&live, 10, 1).has_value());
  EXPECT_FALSE(Train(&live, 200, 1).has_value());
  live.TakeShape(live.plan().version(), Better(v1::ParallelismSpec::ZIGZAG, live.plan()));
  EXPECT_FALSE(Train(&live, 200, 1).has_value());
}

// The coordinator was killed between announcing a change and its step.
TEST_F(LivePlanTest, ARestartedCoordinatorGoesOnFromWhatWasAnnounced) {
  v1::StepPlan announced;
  {
    LivePlan live(spec_, plan_, nullptr, true);
    Train(&live, 100, 1);
    live.TakeShape(1, Better(v1::ParallelismSpec::ZIGZAG, plan_));
    announced = *Train(&live, 1, 1);
  }
  v1::StepReport last;
  last.set_step(step_);
  last.set_plan_version(1);
  const uint64_t step = step_;
  LivePlan taken(spec_, announced, &last, true);
  EXPECT_FALSE(Train(&taken, 4, 1).has_value());
  EXPECT_FALSE(Train(&taken, 30, 2).has_value());
  EXPECT_EQ(taken.plan().layout(), v1::ParallelismSpec::ZIGZAG);
  step_ = step;
  LivePlan missed(spec_, announced, &last, true);
  const auto withdrawal = Train(&missed, 30, 1);
  ASSERT_TRUE(withdrawal.has_value());
  EXPECT_EQ(withdrawal->layout(), v1::ParallelismSpec::STRIPED);
}

// Reports that waited, e.g. for a coordinator with a full disk, are of steps long before the
// ranks'.
TEST_F(LivePlanTest, NothingIsDatedByAReportThatWaited) {
  LivePlan live(spec_, plan_, nullptr, true);
  Train(&live, 100, 1);
  live.TakeShape(1, Better(v1::ParallelismSpec::ZIGZAG, plan_));
  age_ = absl::Seconds(6);
  EXPECT_FALSE(Train(&live, 10, 1).has_value());
  age_ = absl::Seconds(4);
  EXPECT_TRUE(Train(&live, 1, 1).has_value());
}

TEST_F(LivePlanTest, ASlowRanksGroupGetsLess) {
  LivePlan live(spec_, plan_, nullptr, true);
  paces_ = {10, 10, 10, 12.5};
  const auto next = Train(&live, 200, 1);
  ASSERT_TRUE(next.has_value());
  ASSERT_EQ(next->group_permille_size(), 2);
  EXPECT_EQ(next->group_permille(0), 1000u);
  EXPECT_NEAR(next->group_permille(1), 800, 15);
  EXPECT_EQ(next->weights_from_step(), next->effective_step());
  ASSERT_EQ(next->earlier_weights_size(), 1);
  EXPECT_EQ(next->earlier_weights(0).group_permille_size(), 0);
  EXPECT_THAT(next->reasons(), Contains(HasSubstr("rank 3 takes 1.25 x as long")));
  ASSERT_EQ(live.slow_ranks().size(), 1u);
  EXPECT_FALSE(Train(&live, 100, 2).has_value()) << "it is as slow as was said";
  paces_[3] = 10;
  const auto again = Train(&live, 100, 2);
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->group_permille_size(), 0);
}

// The coordinator's record was put back to an earlier state: what ranks do is not known.
TEST_F(LivePlanTest, RanksThatGoByANewerPlanAreLeftAlone) {
  LivePlan live(spec_, plan_, nullptr, true);
  EXPECT_FALSE(Train(&live, 100, 4).has_value());
  live.TakeShape(1, Better(v1::ParallelismSpec::ZIGZAG, plan_));
  EXPECT_FALSE(Train(&live, 100, 4).has_value());
}

// A change is announced five steps ahead.
TEST_F(LivePlanTest, NothingChangesThatTheJobDoesNotReach) {
  spec_.mutable_training()->set_steps(105);
  LivePlan live(spec_, plan_, nullptr, true);
  EXPECT_FALSE(Train(&live, 99, 1).has_value());
  v1::StepReport report;
  report.set_step(90);
  report.set_step_seconds(1);
  EXPECT_EQ(live.StepsLeft(report), 11u);
  EXPECT_TRUE(live.WantsShape(report));
  live.TakeShape(1, Better(v1::ParallelismSpec::ZIGZAG, plan_));
  EXPECT_TRUE(Train(&live, 1, 1).has_value()) << "step 105 is in it";

  spec_.mutable_training()->set_steps(104);
  step_ = 0;
  LivePlan shorter(spec_, plan_, nullptr, true);
  EXPECT_FALSE(Train(&shorter, 99, 1).has_value());
  shorter.TakeShape(1, Better(v1::ParallelismSpec::ZIGZAG, plan_));
  EXPECT_FALSE(Train(&shorter, 5, 1).has_value());
  report.set_step(100);
  EXPECT_EQ(shorter.StepsLeft(report), 0u);
  EXPECT_FALSE(shorter.WantsShape(report));
}

TEST_F(LivePlanTest, ALookTakesPlaceEvery32Steps) {
  LivePlan live(spec_, plan_, nullptr, true);
  EXPECT_FALSE(Train(&live, 100, 1).has_value());
  v1::StepReport report;
  report.set_step_seconds(1);
  const auto wants = [&](uint64_t step) {
    report.set_step(step);
    return live.WantsShape(report);
  };
  EXPECT_TRUE(wants(100));
  EXPECT_FALSE(wants(101));
  EXPECT_FALSE(wants(131));
  EXPECT_TRUE(wants(132));
  EXPECT_FALSE(wants(133));
}

// What the attempt before found of a group holds until enough of this one was seen.
TEST_F(LivePlanTest, AGroupIsSlowUntilFiftyStepsSayOtherwise) {
  plan_.add_group_permille(1000);
  plan_.add_group_permille(800);
  step_ = 1000;
  LivePlan live(spec_, plan_, nullptr, true);
  EXPECT_FALSE(Train(&live, 49, 1).has_value());
  const auto next = Train(&live, 1, 1);
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->group_permille_size(), 0);
}

TEST_F(LivePlanTest, WhatMayNotChangeIsOnlyLookedAt) {
  LivePlan live(spec_, plan_, nullptr, false);
  paces_ = {10, 10, 10, 12.5};
  EXPECT_FALSE(Train(&live, 300, 1).has_value());
  EXPECT_EQ(live.slow_ranks().size(), 1u);
  v1::StepReport report;
  report.set_step(400);
  EXPECT_FALSE(live.WantsShape(report));
}

}  // namespace
}  // namespace ringleader::planner
