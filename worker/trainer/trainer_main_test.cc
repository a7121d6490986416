// How the process around a step loop ends, whatever the step loop does.
#include "worker/trainer/trainer_main.h"

#include <filesystem>
#include <string>
#include <vector>

#include "base/testing/temp_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
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
  // An attempt of two ranks; where `peer_address` is set they are told that they are there.
  std::vector<RankLog> Run(const std::string& peer_address = "", const std::string& job = "tiny") {
    v1::JobSpec spec = testing::TinyJob(directory_.path().string(), 2);
    spec.set_name(job);
    FakeAgent agent(directory_.File("agent"), spec, testing::TinyPlan(spec), /*ranks=*/2);
    agent.set_peer_address(peer_address);
    const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
    agent.Spawn(self.parent_path() / "stuck_trainer", directory_.path().string());
    return agent.Finish();
  }

  TempDir directory_;
};

// The others' memory and slots are not kept by one that hangs in a kernel.
TEST_F(TrainerMainTest, ARankThatHangsLeavesWhenAnotherFailed) {
  const std::vector<RankLog> logs = Run();
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

}  // namespace
}  // namespace ringleader::trainer
