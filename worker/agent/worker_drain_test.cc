// How a worker leaves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/agent/testing/worker_fixture.h"

namespace ringleader::agent {
namespace {

using ::testing::HasSubstr;

TEST_F(WorkerTest, ADrainIsAskedForInEverySessionUntilAllHaveLeft) {
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  coordinator_.Await(IsAck);
  EXPECT_TRUE(coordinator_.Received(IsDrain).empty());
  worker_->Drain("SIGTERM");
  EXPECT_EQ(coordinator_.Await(IsDrain).drain().reason(), "SIGTERM");
  worker_->Drain("once more");
  AwaitAcknowledged();
  coordinator_.EndSession();
  EXPECT_TRUE(Becomes([&] { return coordinator_.Received(IsDrain).size() == 2; }));
  EXPECT_EQ(coordinator_.Received(IsDrain).back().drain().reason(), "SIGTERM");
  coordinator_.Send(StartOf(1));  // of the same attempt: it runs
  v1::Command other = StartOf(1);
  other.set_job("other");
  other.set_fencing_token(8);
  coordinator_.Send(other);
  EXPECT_TRUE(Becomes([&] { return coordinator_.Received(IsAck).size() == 3; }));
  const v1::CommandAck refused = coordinator_.Received(IsAck).back().command_ack();
  EXPECT_EQ(refused.message(), "the worker is shutting down");
  EXPECT_TRUE(refused.later());
  EXPECT_FALSE(is_over_);
  coordinator_.Send(Abort());
  EXPECT_EQ(Leave(), absl::OkStatus());
  const std::vector<v1::WorkerMessage> exits = coordinator_.Received(IsExit);
  ASSERT_EQ(exits.size(), 1u) << "all was told before it left";
  EXPECT_THAT(exits[0].event().trainer_exited().message(), HasSubstr("why"))
      << "a drain gives trainers the time that it was given";
}

// And then it is what a restart of the machine, or of a whole cluster of them, waits for.
TEST_F(WorkerTest, LeavesAsSoonAsItsLastWordsAreAcknowledged) {
  constexpr absl::Duration kFarewell = absl::Seconds(5);  // where nobody acknowledges them
  Start();
  AwaitWelcome();
  const absl::Time begin = absl::Now();
  EXPECT_EQ(Leave(), absl::OkStatus());
  EXPECT_LT(absl::Now() - begin, kFarewell);
  EXPECT_EQ(coordinator_.Received(IsDrain).size(), 1u);
}

TEST_F(WorkerTest, WhatWasDroppedIsCountedByKind) {
  max_log_buffer_bytes_ = 0;
  trainers_do_ = "echo one; echo two >&2";
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  EXPECT_TRUE(Becomes([&] { return Metric("dropped_log_lines_total") == 2; }));
  coordinator_.Send(Abort());
  EXPECT_EQ(Leave(), absl::OkStatus());
  EXPECT_EQ(Metric("dropped_step_reports_total"), 0);
}

// A coordinator whose disk is full acknowledges nothing.
TEST_F(WorkerTest, LeavesAlthoughNobodyAcknowledgesItsLastWords) {
  Start();
  AwaitWelcome();
  coordinator_.silent = true;
  worker_->Drain("SIGTERM");
  EXPECT_TRUE(Becomes([&] { return is_over_.load(); }));
  EXPECT_EQ(coordinator_.Received(IsDrain).size(), 1u) << "it was in session";
  coordinator_.silent = false;
  coordinator_.EndSession();
  EXPECT_EQ(Leave(), absl::OkStatus());
}

// Else its coordinator would take the trainers for alive, and wait before it replaces them.
TEST_F(WorkerTest, WhatItKilledAtTheEndOfADrainIsToldOnceSomebodyListens) {
  drain_timeout_ = absl::Milliseconds(200);
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  coordinator_.Await(IsAck);
  PidOf(0);
  coordinator_.Refuse(grpc::Status(grpc::StatusCode::UNAVAILABLE, "not now"));
  coordinator_.EndSession();
  worker_->Drain("SIGTERM");
  EXPECT_TRUE(Becomes([&] { return Metric("trainers") == 0; }));
  coordinator_.Refuse(grpc::Status::OK);
  EXPECT_TRUE(Becomes([&] { return is_over_.load(); }));
  EXPECT_EQ(Leave(), absl::OkStatus());
  const std::vector<v1::WorkerMessage> exits = coordinator_.Received(IsExit);
  ASSERT_EQ(exits.size(), 1u);
  EXPECT_EQ(exits[0].event().trainer_exited().message(), "the worker had to end");
}

// It was away for a moment, and says itself what is to become of what runs.
TEST_F(WorkerTest, ACoordinatorThatIsBackIsNotOvertaken) {
  constexpr absl::Duration kPatienceWithCoordinator = absl::Seconds(3);
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  coordinator_.Await(IsAck);
  const auto pid = static_cast<uint32_t>(PidOf(0));
  worker_->Drain("SIGTERM");
  coordinator_.Await(IsDrain);
  coordinator_.Refuse(grpc::Status(grpc::StatusCode::UNAVAILABLE, "not now"));
  coordinator_.EndSession();
  EXPECT_TRUE(Becomes([&] { return Metric("connected") == 0; }));
  const absl::Time lost = absl::Now();
  coordinator_.Refuse(grpc::Status::OK);
  EXPECT_TRUE(Becomes([&] { return Metric("sessions_total") == 2; }));
  TrainerStream trainer(socket_);
  const auto& stream = trainer.stream;
  v1::TrainerMessage& message = trainer.message;
  message.mutable_hello()->set_pid(pid);
  ASSERT_TRUE(stream->Write(message));
  v1::AgentMessage answer;
  ASSERT_TRUE(stream->Read(&answer));
  EXPECT_TRUE(answer.has_assignment());
  // For longer than it would have waited, had nobody come back.
  while (absl::Now() < lost + kPatienceWithCoordinator + absl::Milliseconds(300)) {
    ASSERT_TRUE(stream->Read(&answer));
    EXPECT_TRUE(answer.has_lease()) << answer.ShortDebugString();
  }
  coordinator_.Send(Abort());
  while (stream->Read(&answer) && !answer.has_stop()) {
  }
  EXPECT_EQ(answer.stop().mode(), v1::StopTrainers::ABORT);
  stream->WritesDone();
  EXPECT_EQ(Leave(), absl::OkStatus());
}

TEST_F(WorkerTest, WithoutACoordinatorADrainStopsWhatRuns) {
  constexpr absl::Duration kPatienceWithCoordinator = absl::Seconds(3);
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  coordinator_.Await(IsAck);
  const pid_t pid = PidOf(0);
  TrainerStream trainer(socket_);
  trainer.message.mutable_hello()->set_pid(static_cast<uint32_t>(pid));
  ASSERT_TRUE(trainer.stream->Write(trainer.message));
  coordinator_.Refuse(grpc::Status(grpc::StatusCode::UNAVAILABLE, "not now"));
  coordinator_.EndSession();
  worker_->Drain("SIGTERM");
  v1::AgentMessage answer;
  while (trainer.stream->Read(&answer) && !answer.has_stop()) {
  }
  EXPECT_EQ(answer.stop().mode(), v1::StopTrainers::CHECKPOINT);
  EXPECT_EQ(answer.stop().reason(), "SIGTERM");
  // What is left of the worker's own time, some of which it has waited for its coordinator.
  EXPECT_GT(answer.stop().grace_milliseconds(), 0u);
  EXPECT_LE(absl::Milliseconds(answer.stop().grace_milliseconds()),
            drain_timeout_ - kPatienceWithCoordinator);
  kill(pid, SIGKILL);  // as a trainer would that leaves
  trainer.stream->WritesDone();
  EXPECT_EQ(Leave(), absl::OkStatus());
}

}  // namespace
}  // namespace ringleader::agent
