// What the phases of a step say where one rank keeps another waiting.
#include "worker/trainer/phase_seconds.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "worker/trainer/testing/run_test.h"

namespace ringleader::trainer {
namespace {

class PhaseSecondsTest : public testing::RunTest {};

// Rank 1 comes late to the update: what rank 0 waits there is most of its step.
TEST_F(PhaseSecondsTest, WhatARankWaitsForAnotherInTheUpdateIsCounted) {
  TrainingJob job = Job(2);
  job.steps = 1;
  absl::Notification first_came;
  NewHosts(job)[0].on_place = [&](const std::string& phase) {
    if (phase == "optimizer") first_came.Notify();
  };
  hosts_[1].on_place = [&](const std::string& phase) {
    if (phase != "optimizer") return;
    EXPECT_TRUE(first_came.WaitForNotificationWithTimeout(absl::Seconds(60)));
    absl::SleepFor(absl::Seconds(1));
  };
  Run(job);
  const StepRecord& step = hosts_[0].steps.at(0);
  double counted = -step.phases.evaluation;  // before the step
  for (const auto& [name, member] : kPhases) counted += step.phases.*member;
  EXPECT_GT(counted, step.step_seconds / 2);
}

}  // namespace
}  // namespace ringleader::trainer
