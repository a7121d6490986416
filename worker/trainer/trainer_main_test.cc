// How the process around a step loop ends, whatever the step loop does.
#include "worker/trainer/trainer_main.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/testing/temp_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/testing/raw_peer.h"
#include "worker/trainer/link/agent_link.h"
#include "worker/trainer/testing/fake_agent.h"
#include "worker/trainer/testing/stuck_trainer.h"
#include "worker/trainer/testing/tiny_job.h"

namespace ringleader::trainer {
namespace {

using testing::FakeAgent;
using ::testing::HasSubstr;
using testing::RankLog;

class TrainerMainTest : public ::testing::Test {
 protected:
  v1::JobSpec Spec(const std::string& job = "tiny", int ranks = 2) {
    v1::JobSpec spec = testing::TinyJob(directory_.path().string(), ranks);
    spec.set_name(job);
    return spec;
  }
  std::vector<RankLog> Run(FakeAgent& agent) {
    agent.Spawn(program_, directory_.path().string());
    return agent.Finish();
  }
  // An attempt of two ranks; where `peer_address` is set they are told that they are there.
  std::vector<RankLog> Run(const std::string& peer_address = "", const std::string& job = "tiny") {
    FakeAgent agent(socket_, Spec(job), testing::TinyPlan(Spec(job)), /*ranks=*/2);
    agent.set_peer_address(peer_address);
    return Run(agent);
  }
  // How an attempt of one rank ends that fails with this code.
  v1::TrainerResult FailureWith(absl::StatusCode code) {
    const v1::JobSpec spec = Spec(FailingJob(code), /*ranks=*/1);
    FakeAgent agent(socket_, spec, testing::TinyPlan(spec), /*ranks=*/1);
    return Run(agent).at(0).result.value_or(v1::TrainerResult());
  }
  static std::string FailingJob(absl::StatusCode code) {
    return absl::StrCat(testing::kFailsWithJob, static_cast<int>(code));
  }

  TempDir directory_;
  const std::string socket_ = directory_.File("agent");
  std::string program_ =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "stuck_trainer";
};

// The others' memory and slots are not kept by one that hangs in a kernel.
TEST_F(TrainerMainTest, ARankThatHangsLeavesWhenAnotherFailed) {
  FakeAgent agent(socket_, Spec(), testing::TinyPlan(Spec()), /*ranks=*/2);
  agent.Spawn(program_, directory_.path().string());
  // It is given 3 s to come back by itself.
  EXPECT_TRUE(
      agent.WaitFor([](const std::vector<RankLog>& logs) { return logs[0].result.has_value(); },
                    absl::Seconds(40)));
  const std::vector<RankLog> logs = agent.Finish();
  ASSERT_TRUE(logs[0].result.has_value());
  EXPECT_EQ(logs[0].result->outcome(), v1::TrainerExited::FAILED);
  EXPECT_THAT(logs[0].result->message(), HasSubstr("rank 1: it is out of memory"));
  EXPECT_TRUE(logs[0].result->collateral());
  ASSERT_TRUE(logs[1].result.has_value());
  EXPECT_FALSE(logs[1].result->collateral());
}

// Its error is no other's doing, whoever was first: it is the one that no other attempt mends.
TEST_F(TrainerMainTest, AnErrorOfARanksOwnAfterAnothersFailureIsItsOwn) {
  const std::vector<RankLog> logs = Run(/*peer_address=*/"", testing::kOwnErrorJob);
  ASSERT_TRUE(logs[0].result.has_value());
  EXPECT_EQ(logs[0].result->outcome(), v1::TrainerExited::FAILED);
  EXPECT_EQ(logs[0].result->message(), "its data are of another model");
  EXPECT_FALSE(logs[0].result->collateral());
  EXPECT_FALSE(logs[0].result->retryable());
  ASSERT_TRUE(logs[1].result.has_value());
  EXPECT_EQ(logs[1].result->message(), "it is out of memory");
  EXPECT_FALSE(logs[1].result->collateral());
  EXPECT_TRUE(logs[1].result->retryable());
}

// A rank that reaches no other knows nothing of why: whoever failed first is to be named.
TEST_F(TrainerMainTest, ARankThatCannotConnectIsCollateral) {
  for (const RankLog& log : Run("nowhere")) {
    ASSERT_TRUE(log.result.has_value());
    EXPECT_EQ(log.result->outcome(), v1::TrainerExited::FAILED);
    EXPECT_TRUE(log.result->collateral()) << log.result->message();
  }
}

// It is this node that has no such address: nobody else is to be named.
TEST_F(TrainerMainTest, ARankThatCannotListenIsItselfToBlame) {
  FakeAgent agent(socket_, Spec(), testing::TinyPlan(Spec()), /*ranks=*/2);
  agent.set_listen_host("192.0.2.1");
  for (const RankLog& log : Run(agent)) {
    ASSERT_TRUE(log.result.has_value());
    EXPECT_EQ(log.result->outcome(), v1::TrainerExited::FAILED);
    EXPECT_THAT(log.result->message(), HasSubstr("192.0.2.1"));
    EXPECT_FALSE(log.result->collateral());
  }
}

// What the end of a process finds unread is lost: the peer would take that end for the cause.
TEST_F(TrainerMainTest, AFailureIsHeardByAPeerThatReadsLate) {
  const v1::JobSpec spec = Spec(FailingJob(absl::StatusCode::kResourceExhausted));
  FakeAgent agent(socket_, spec, testing::TinyPlan(spec), /*ranks=*/2);
  agent.SpawnRank(0, program_, directory_.path().string());
  comm::testing::RawPeer peer(FakeAgent::kToken);
  peer.Pause();
  const auto link = AgentLink::Attach(
      {.socket = socket_, .rank = 1, .fencing_token = FakeAgent::kToken}, [](const std::string&) {},
      [](absl::Time) {});
  ASSERT_TRUE(link->WaitForAssignment().ok());
  const auto peers = link->ReportReady(peer.address());
  ASSERT_TRUE(peers.ok()) << peers.status();
  EXPECT_TRUE(peer.AwaitReceived(1)) << "its first word";
  peer.Dial(peers->addresses.at(0));
  EXPECT_FALSE(
      agent.WaitFor([](const std::vector<RankLog>& logs) { return logs[0].result.has_value(); },
                    absl::Milliseconds(300)))
      << "it waits for the peer";
  peer.Resume();
  EXPECT_TRUE(peer.AwaitReceived(2));
  EXPECT_EQ(peer.Received().back().abort_reason(), "rank 0: it cannot go on");
  link->Close();
  const std::vector<RankLog> logs = agent.Finish();
  ASSERT_TRUE(logs[0].result.has_value());
  EXPECT_EQ(logs[0].result->message(), "it cannot go on");
  EXPECT_FALSE(logs[0].result->collateral());
  EXPECT_EQ(logs[0].exit_code, 1);
  // Whoever reads the rank's log finds the reason there, too.
  EXPECT_THAT(ReadFile(directory_.File("rank-0.log")).value(), HasSubstr("it cannot go on"));
}

// A job that asks for what cannot be fails the same way each time; a node may lack what others
// have.
TEST_F(TrainerMainTest, WhatTheJobAsksForIsNotTriedAgain) {
  for (const auto code : {absl::StatusCode::kDataLoss, absl::StatusCode::kFailedPrecondition,
                          absl::StatusCode::kInvalidArgument, absl::StatusCode::kOutOfRange,
                          absl::StatusCode::kUnimplemented}) {
    const v1::TrainerResult result = FailureWith(code);
    EXPECT_EQ(result.message(), "it cannot go on");
    EXPECT_FALSE(result.retryable()) << absl::StatusCodeToString(code);
  }
  for (const auto code : {absl::StatusCode::kNotFound, absl::StatusCode::kUnavailable,
                          absl::StatusCode::kInternal, absl::StatusCode::kCancelled}) {
    const v1::TrainerResult result = FailureWith(code);
    EXPECT_EQ(result.outcome(), v1::TrainerExited::FAILED);
    EXPECT_TRUE(result.retryable()) << absl::StatusCodeToString(code);
  }
}

// gRPC would say nothing when the last descriptor is gone, and try for ever.
TEST_F(TrainerMainTest, TooFewDescriptorsForSoManyRanksAreTold) {
  const std::string limited = directory_.File("limited");
  const std::string real_program = std::exchange(program_, limited);
  for (const int limit : {261, 262}) {
    std::ofstream(limited) << "#!/bin/sh\nulimit -n " << limit << "\nexec " << real_program
                           << " \"$@\"\n";
    std::filesystem::permissions(limited, std::filesystem::perms::owner_all);
    const std::string log = directory_.File("rank-0.log");
    std::filesystem::remove(log);
    Run(/*peer_address=*/"", FailingJob(absl::StatusCode::kInternal));
    const std::string said = ReadFile(log).value();
    EXPECT_EQ(said.find("files, and 2 ranks may need 262") != std::string::npos, limit == 261)
        << said;
  }
}

}  // namespace
}  // namespace ringleader::trainer
