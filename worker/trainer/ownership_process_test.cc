// What keeps real trainers of a job that was replaced, or of another job, from changing anything.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/trainer/testing/attempt_test.h"

namespace ringleader::trainer {
namespace {

using ::testing::HasSubstr;
using testing::RankLog;

class OwnershipProcessTest : public testing::AttemptTest {
 protected:
  v1::JobSpec EndlessJob(int ranks) {
    v1::JobSpec spec = Job(ranks);
    spec.mutable_training()->set_steps(1'000'000);
    return spec;
  }
  // How the process ended; all zeros if it did not by `deadline` (BootNow()).
  static siginfo_t EndOf(pid_t pid, absl::Time deadline) {
    siginfo_t info{};
    while (info.si_pid == 0 && BootNow() < deadline) {
      absl::SleepFor(absl::Milliseconds(5));
      (void)waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT | WNOHANG);
    }
    return info;
  }
  static std::set<std::string> Checkpoints(const v1::JobSpec& spec) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(spec.checkpoint().directory())) {
      const std::string name = entry.path().filename();
      if (name.starts_with("step-")) names.insert(name);
    }
    return names;
  }
};

// Neither its worker nor whoever stopped it does anything more. The kernel ends the stopped
// trainer, which never finishes what it was writing.
TEST_F(OwnershipProcessTest, ATrainerEndsWithItsLeaseThoughItIsStopped) {
  const v1::JobSpec spec = EndlessJob(1);
  const auto agent = Start(spec);
  AwaitStep(*agent, 2);
  const absl::Time end = BootNow() + absl::Seconds(20);
  agent->Send(0, testing::LeaseUntil(end));
  // What is sent after the lease is read after it.
  v1::AgentMessage profile;
  profile.mutable_profile()->set_steps(1);
  agent->Send(0, profile);
  while (!std::filesystem::exists(spec.checkpoint().directory() + "/profiles")) {
    ASSERT_LT(BootNow(), end) << "it took too long to take the lease for this to test anything";
    absl::SleepFor(absl::Milliseconds(5));
  }
  ASSERT_EQ(kill(agent->pid(0), SIGSTOP), 0);
  const siginfo_t info = EndOf(agent->pid(0), end + absl::Seconds(30));
  EXPECT_GE(BootNow(), end);
  EXPECT_EQ(info.si_code, CLD_KILLED);
  EXPECT_EQ(info.si_status, SIGKILL);
}

TEST_F(OwnershipProcessTest, ALeaseThatIsRenewedGoesOn) {
  const auto agent = Start(EndlessJob(1));
  AwaitStep(*agent, 2);
  const absl::Time first = BootNow() + absl::Seconds(10);
  agent->Send(0, testing::LeaseUntil(first));
  agent->Send(0, testing::LeaseUntil(first + absl::Hours(1)));
  EXPECT_TRUE(agent->WaitFor([first](const std::vector<RankLog>& logs) {
    return BootNow() > first + absl::Seconds(1) && !logs[0].gone;
  })) << Output();
}

// The first attempt goes on beside its successor, e.g. because its machine was suspended for so
// long that nobody waited for it.
TEST_F(OwnershipProcessTest, AnAttemptThatWasReplacedPublishesNothingAndEnds) {
  v1::JobSpec spec = EndlessJob(2);
  const auto old = Start(spec);
  ASSERT_TRUE(old->WaitFor([](const std::vector<RankLog>& logs) {
    return !logs[0].checkpoints.empty();
  })) << Output();
  ASSERT_EQ(kill(old->pid(0), SIGSTOP), 0);
  ++fencing_token_;
  StopEarly(spec);
  const std::set<std::string> before = Checkpoints(spec);
  ASSERT_EQ(kill(old->pid(0), SIGCONT), 0);
  const std::vector<RankLog> logs = old->Finish();
  ASSERT_TRUE(logs[0].result.has_value());
  EXPECT_EQ(logs[0].result->outcome(), v1::TrainerExited::FAILED);
  EXPECT_THAT(logs[0].result->message(), HasSubstr("has begun since"));
  EXPECT_TRUE(std::any_of(logs.begin(), logs.end(), [](const RankLog& log) {
    return log.result.has_value() && !log.result->collateral();
  })) << "somebody found it out first";
  EXPECT_EQ(Checkpoints(spec), before);
}

TEST_F(OwnershipProcessTest, TheCheckpointFolderOfAnotherJobIsRefused) {
  v1::JobSpec spec = Job(1);
  RunToEnd(spec);
  // Under another path, so that no coordinator can tell.
  std::filesystem::create_directory_symlink(spec.checkpoint().directory(), Path("alias"));
  spec.set_name("other");
  UseCheckpoints(&spec, Path("alias"));
  ++fencing_token_;
  const v1::TrainerResult refused = Failure(spec);
  EXPECT_THAT(refused.message(), HasSubstr("belongs to jobs/tiny (tiny-1), not to jobs/other"));
  EXPECT_FALSE(refused.retryable());
}

// Its job was deleted, and somebody else's has its name.
TEST_F(OwnershipProcessTest, TheCheckpointFolderOfAnotherOwnerIsRefused) {
  const v1::JobSpec spec = Job(1);
  owner_ = "alice";
  RunToEnd(spec);
  owner_ = "bob";
  ++fencing_token_;
  const v1::TrainerResult refused = Failure(spec);
  EXPECT_THAT(refused.message(), HasSubstr("belongs to alice"));
  EXPECT_FALSE(refused.retryable());
}

}  // namespace
}  // namespace ringleader::trainer
