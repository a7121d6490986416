// What a worker says, starts and carries on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>

#include "absl/time/time.h"
#include "base/boot_clock.h"
#include "worker/agent/testing/worker_fixture.h"

namespace ringleader::agent {
namespace {

using ::testing::HasSubstr;

TEST_F(WorkerTest, SaysAllThatItIsAndWhatItRuns) {
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  EXPECT_THAT(coordinator_.hellos().at(0),
              EqualsText(absl::StrFormat(
                  R"(node: "nodes/a" incarnation: "folder.1" version: "%s" protocol_version: %d
         inventory { trainers: 2 gpus { uuid: "GPU-a" } gpus { uuid: "GPU-b" } })",
                  std::string(kVersion), kProtocolVersion)));
  coordinator_.Send(StartOf(2));
  EXPECT_TRUE(coordinator_.Await(IsAck).command_ack().accepted());
  AwaitAcknowledged();
  coordinator_.EndSession();
  ASSERT_TRUE(Becomes([&] { return coordinator_.hellos().size() == 2; }));
  EXPECT_THAT(coordinator_.hellos()[1],
              EqualsText(absl::StrFormat(
                  R"(node: "nodes/a" incarnation: "folder.1" version: "%s" protocol_version: %d
         inventory { trainers: 2 gpus { uuid: "GPU-a" } gpus { uuid: "GPU-b" } }
         acknowledged_sequence: 1
         attempts { job: "job" attempt: 1 fencing_token: 7 ranks: [0, 1] })",
                  std::string(kVersion), kProtocolVersion)));
  EXPECT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  EXPECT_TRUE(Becomes([&] { return Metric("sessions_total") == 2; }));
  EXPECT_EQ(Metric("trainer_slots"), 2);
  EXPECT_EQ(Metric("trainers"), 2);
  EXPECT_TRUE(Becomes([&] { return Metric("connected") == 1; }));
  coordinator_.Send(Abort());
  EXPECT_EQ(coordinator_.Await(IsExit).event().trainer_exited().message(), "why");
  EXPECT_TRUE(Becomes([&] { return coordinator_.Received(IsExit).size() == 2; }));
  EXPECT_TRUE(Becomes([&] { return Metric("trainers") == 0; }));
  EXPECT_EQ(Leave(), absl::OkStatus());
}

TEST_F(WorkerTest, TrainersOfOtherUsersReachItsSocket) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  const auto modes = [this] {
    struct stat folder {
    }, socket{};
    stat(dir_.File("data").c_str(), &folder);
    stat(socket_.c_str(), &socket);
    return absl::StrFormat("%o %o", folder.st_mode & 0001, socket.st_mode & 0006);
  };
  run_as_ = RunAs::Parse({"nobody"}).value();
  Start();
  EXPECT_EQ(modes(), "1 6");
}

TEST_F(WorkerTest, CarriesWordBetweenATrainerAndTheCoordinator) {
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  TrainerStream trainer(socket_);
  const auto& stream = trainer.stream;
  v1::TrainerMessage& message = trainer.message;
  message.mutable_hello()->set_pid(static_cast<uint32_t>(PidOf(0)));
  ASSERT_TRUE(stream->Write(message));
  v1::AgentMessage answer;
  ASSERT_TRUE(stream->Read(&answer));
  EXPECT_EQ(answer.assignment().job(), "job");
  EXPECT_GT(answer.assignment().lease().end_boot_nanoseconds(), 0);
  const int64_t first_lease = answer.assignment().lease().end_boot_nanoseconds();
  ASSERT_TRUE(stream->Read(&answer)) << "each heartbeat that arrived renews it";
  EXPECT_GT(answer.lease().end_boot_nanoseconds(), first_lease);
  message.mutable_step()->set_step(3);
  ASSERT_TRUE(stream->Write(message));
  EXPECT_EQ(
      coordinator_.Await([](const v1::WorkerMessage& sent) { return sent.event().has_step(); })
          .event()
          .step()
          .step(),
      3u);
  message.mutable_result()->set_outcome(v1::TrainerExited::COMPLETED);
  message.mutable_result()->set_message("done");
  ASSERT_TRUE(stream->Write(message));
  stream->WritesDone();
  while (stream->Read(&answer)) {
  }
  kill(PidOf(0), SIGKILL);
  EXPECT_EQ(coordinator_.Await(IsExit).event().trainer_exited().message(), "done");
}

// It cannot be told, and its grace would be for nothing.
TEST_F(WorkerTest, ATrainerThatHungUpIsKilledByAnAbortAtOnce) {
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  TrainerStream trainer(socket_);
  trainer.message.mutable_hello()->set_pid(static_cast<uint32_t>(PidOf(0)));
  ASSERT_TRUE(trainer.stream->Write(trainer.message));
  v1::AgentMessage answer;
  ASSERT_TRUE(trainer.stream->Read(&answer));
  trainer.stream->WritesDone();
  while (trainer.stream->Read(&answer)) {
  }
  // Its process lives on. That its stream has ended may be news to the worker after one abort.
  EXPECT_TRUE(Becomes([&] {
    v1::Command abort = Abort();
    abort.mutable_stop()->set_grace_milliseconds(3'600'000);
    coordinator_.Send(abort);
    return !coordinator_.Received(IsExit).empty();
  }));
  EXPECT_EQ(coordinator_.Await(IsExit).event().trainer_exited().message(), "why");
}

TEST_F(WorkerTest, WhoIsNoTrainerOfItsOwnIsToldSo) {
  Start();
  TrainerStream trainer(socket_);
  const auto& stream = trainer.stream;
  v1::TrainerMessage& message = trainer.message;
  stream->Write(message);
  v1::AgentMessage answer;
  EXPECT_FALSE(stream->Read(&answer));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(status.error_message(), "not a trainer that this worker started");
}

TEST_F(WorkerTest, AGpuWithAFaultIsToldAndTakesNoTrainer) {
  SetFault("GPU-b", "broken from the start");
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  EXPECT_THAT(coordinator_.hellos().at(0).inventory(),
              EqualsText("trainers: 1 gpus { uuid: 'GPU-a' } gpus { uuid: 'GPU-b' fault: 'broken "
                         "from the start' }"));
  EXPECT_EQ(Metric("trainer_slots"), 1);
  coordinator_.Send(StartOf(2));
  EXPECT_THAT(coordinator_.Await(IsAck).command_ack().message(),
              HasSubstr("a GPU is out of order"));
  SetFault("GPU-a", "broke now");
  EXPECT_TRUE(Becomes([&] { return Metric("trainer_slots") == 0; }));
  const auto tells = [](const v1::WorkerMessage& message) {
    return message.inventory().gpus_size() > 0 && message.inventory().gpus(0).fault() != "";
  };
  EXPECT_THAT(coordinator_.Await(tells).inventory(),
              EqualsText("gpus { uuid: 'GPU-a' fault: 'broke now' } "
                         "gpus { uuid: 'GPU-b' fault: 'broken from the start' }"));
  const auto any = [](const v1::WorkerMessage& message) { return message.has_inventory(); };
  EXPECT_EQ(coordinator_.Received(any).size(), 2u) << "said once each";
  // As many are faulty as before, and it is another fault.
  SetFault("GPU-a", "fell off the bus");
  EXPECT_TRUE(Becomes([&] { return coordinator_.Received(any).size() == 3; }));
  EXPECT_EQ(coordinator_.Received(any).back().inventory().gpus(0).fault(), "fell off the bus");
}

TEST_F(WorkerTest, OutOfContactItsTrainersEnd) {
  coordinator_.fence_milliseconds = 3'000;
  const absl::Time before = BootNow();
  Start();
  ASSERT_TRUE(Becomes([&] { return coordinator_.in_session(); }));
  coordinator_.Send(StartOf(1));
  coordinator_.Await(IsAck);
  PidOf(0);
  EXPECT_TRUE(coordinator_.Received(IsExit).empty());
  coordinator_.silent = true;
  const v1::TrainerExited exited = coordinator_.Await(IsExit).event().trainer_exited();
  EXPECT_THAT(exited.message(), HasSubstr("out of contact with the coordinator"));
  EXPECT_GT(Metric("out_of_contact_seconds"), 0.3);
  EXPECT_LE(Metric("out_of_contact_seconds"), absl::ToDoubleSeconds(BootNow() - before));
  EXPECT_TRUE(Becomes([&] { return Metric("buffered_messages") == 1; }))
      << "nobody has acknowledged the trainer's end";
  coordinator_.silent = false;
}

TEST_F(WorkerTest, ARefusalForGoodEndsIt) {
  coordinator_.Refuse(grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "you are not a"));
  Start();
  EXPECT_TRUE(Becomes([&] { return is_over_.load(); }));
  runner_.join();
  EXPECT_EQ(outcome_, absl::PermissionDeniedError("you are not a"));
}

}  // namespace
}  // namespace ringleader::agent
