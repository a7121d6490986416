// A job's machine, the clock that drives it, and what its ranks report.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/lifecycle/job/job_machine.h"

namespace ringleader::lifecycle::testing {

// A job of four ranks, 0-1 on node a and 2-3 on node b.
class MachineTest : public ::testing::Test {
 protected:
  MachineTest() : machine_(NewJob(), &options_) {}

  static v1::Job NewJob() {
    v1::Job job;
    job.set_name("jobs/j");
    job.set_state(v1::Job::PENDING);
    job.mutable_spec()->set_name("j");
    job.mutable_spec()->mutable_training()->set_steps(10);
    job.mutable_spec()->mutable_training()->set_global_batch(1);
    job.mutable_spec()->mutable_data()->set_sequence_length(100);
    job.mutable_spec()->mutable_scheduling()->set_max_retries(2);
    return job;
  }

  static v1::Placement On(const std::string& node, uint32_t first_rank) {
    v1::Placement placement;
    placement.set_node(node);
    placement.set_first_rank(first_rank);
    placement.set_trainers(2);
    return placement;
  }

  void Place() { machine_.Place({On("nodes/a", 0), On("nodes/b", 2)}, {}, ++token_, now_); }

  void Ready(uint32_t rank) {
    v1::TrainerReady ready;
    ready.set_rank(rank);
    ready.set_address(absl::StrCat("host:", 1000 + rank));
    machine_.OnReady(ready, now_);
  }

  // Placed, all ranks ready; effects up to here are gone.
  void Run() {
    Place();
    for (uint32_t rank = 0; rank < 4; ++rank) Ready(rank);
    EXPECT_EQ(machine_.job().state(), v1::Job::RUNNING);
    machine_.Take();
  }

  void Exit(uint32_t rank, v1::TrainerExited::Outcome outcome, bool collateral = false,
            bool retryable = true) {
    v1::TrainerExited exited;
    exited.set_rank(rank);
    exited.set_outcome(outcome);
    exited.set_message(collateral ? "a peer is gone" : "out of memory");
    exited.set_collateral(collateral);
    exited.set_retryable(retryable);
    machine_.OnExit(exited, now_);
  }

  void Step(uint64_t step) {
    for (int rank = 0; rank < 4; ++rank) {
      v1::StepReport report;
      report.set_step(step);
      report.set_rank(rank);
      report.set_step_seconds(2);
      report.set_tokens(100);
      machine_.OnStep(report, {"node", "incarnation", step});
    }
  }

  void Pass(absl::Duration time) {
    now_ += time;
    machine_.Tick(now_);
  }

  // "a:start b:start", in order.
  std::vector<std::string> Commands() {
    std::vector<std::string> commands;
    for (const Effects::NodeCommand& effect : machine_.Take().commands) {
      const v1::Command& command = effect.command;
      EXPECT_EQ(command.fencing_token(), token_);
      const std::string what = command.has_start()     ? "start"
                               : command.has_connect() ? "connect"
                               : command.has_profile() ? "profile"
                               : command.has_stop()
                                   ? v1::StopTrainers::Mode_Name(command.stop().mode())
                                   : "plan";
      commands.push_back(effect.node.substr(6) + ":" + what);
    }
    return commands;
  }

  v1::Job::State state() const { return machine_.job().state(); }
  const v1::Attempt& attempt() const { return *machine_.attempt(); }

  Options options_;
  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  uint64_t token_ = 6;
  JobMachine machine_;
};

}  // namespace ringleader::lifecycle::testing
