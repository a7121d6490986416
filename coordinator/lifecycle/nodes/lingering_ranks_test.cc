// Ranks that outlive what is known of them: of jobs that have ended, and of starts that came late.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "coordinator/lifecycle/testing/controller_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Job j with ranks 0 and 1 on node a, and 2 and 3 on b, which has no retries. The worker of a has
// not said yet that it got its start.
class LingeringRanksTest : public testing::ControllerTest {
 protected:
  LingeringRanksTest() {
    a_ = Connect("a", "a.1");
    b_ = Connect("b", "b.1");
    v1::JobSpec spec = Spec("j", 4);
    spec.mutable_scheduling()->set_max_retries(0);
    spec.mutable_checkpoint()->set_directory("/shared/j");
    EXPECT_TRUE(Do([&] { return controller_->CreateJob(spec, {}); }).ok());
    start_ = a_->Commands().at(0);
    token_ = start_.fencing_token();
    Acknowledge(b_, 1, b_->Commands().at(0).command_id());
  }

  void Pass(absl::Duration time) {
    clock_.Advance(time);
    controller_->RunOnce();
  }
  static v1::AttemptEvent Failed(uint32_t rank) {
    v1::AttemptEvent event;
    event.mutable_trainer_exited()->set_rank(rank);
    event.mutable_trainer_exited()->set_outcome(v1::TrainerExited::FAILED);
    return event;
  }
  // Node a is out of sight while the ranks on b fail: j ends, and its ranks on a may be alive.
  void FailWithoutA() {
    a_->FallSilent();
    Pass(options_.lease * 2);
    Say(b_, 2, Failed(2));
    Say(b_, 3, Failed(3));
    Pass(options_.blame_window);
    ASSERT_EQ(Job().state(), v1::Job::FAILED);
    ASSERT_EQ(Job().attempts(0).ranks(0).state(), v1::RankStatus::STARTING);
  }
  void ExpectStops(const std::shared_ptr<testing::FakeSession>& session) {
    const std::vector<v1::Command> commands = session->Commands();
    ASSERT_THAT(commands, SizeIs(1));
    EXPECT_EQ(commands[0].stop().mode(), v1::StopTrainers::ABORT);
    EXPECT_EQ(commands[0].fencing_token(), token_);
  }
  absl::Status Resume() {
    return Do([&] { return controller_->ResumeJob("j", "", {}); }).status();
  }
  uint32_t TrainersOn(const std::string& id) {
    for (const v1::Node& node : controller_->ListNodes()) {
      if (node.name() == "nodes/" + id) return node.trainers_in_use();
    }
    return 0;
  }
  std::string Waits(uint32_t trainers) {
    const auto preview = PreviewOf(Spec("k", trainers));
    return preview.ok() ? preview->pending_reason : preview.status().ToString();
  }

  std::shared_ptr<testing::FakeSession> a_, b_;
  v1::Command start_;
};

TEST_F(LingeringRanksTest, ThoseOfAJobThatFailedAreGivenUpAfterARestartToo) {
  FailWithoutA();
  Restart();
  EXPECT_FALSE(plans_.restored.has_value()) << "it trains no more";
  EXPECT_EQ(TrainersOn("a"), 2u);
  EXPECT_THAT(std::string(Resume().message()), HasSubstr("until its trainers are known to be"));
  EXPECT_THAT(std::string(Do([&]() -> absl::StatusOr<v1::Job> {
                            const absl::Status deleted = controller_->DeleteJob("j", "", {});
                            if (!deleted.ok()) return deleted;
                            return v1::Job();
                          })
                              .status()
                              .message()),
              HasSubstr("may still be alive"));
  v1::JobSpec other = Spec("k");
  other.mutable_checkpoint()->set_directory("/shared/j");
  EXPECT_THAT(std::string(Do([&] { return controller_->CreateJob(other, {}); }).status().message()),
              HasSubstr("is that of jobs/j"));
  Pass(options_.adoption_timeout);
  EXPECT_EQ(Job().attempts(0).ranks(0).state(), v1::RankStatus::LOST);
  EXPECT_EQ(TrainersOn("a"), 0u);
  EXPECT_EQ(Resume(), absl::OkStatus());
}

TEST_F(LingeringRanksTest, ThoseOfAJobThatFailedAreGivenUpAfterAFailedCommitToo) {
  FailWithoutA();
  store_.full = true;
  EXPECT_FALSE(Create("k").ok());
  store_.full = false;
  Pass(options_.adoption_timeout);
  EXPECT_EQ(Job().attempts(0).ranks(0).state(), v1::RankStatus::LOST);
  EXPECT_EQ(Resume(), absl::OkStatus());
}

TEST_F(LingeringRanksTest, ThoseOfAJobThatFailedAreHeardAfterARestart) {
  FailWithoutA();
  Restart();
  const v1::RunningAttempt running = Running();
  auto again = Connect("a", "a.1", {running});
  const std::vector<v1::Command> commands = again->Commands();
  ASSERT_THAT(commands, SizeIs(2));
  EXPECT_TRUE(commands[0].has_start()) << "it was not acknowledged";
  EXPECT_EQ(commands[1].stop().mode(), v1::StopTrainers::ABORT);
  Say(again, 1, Failed(0));
  Say(again, 2, Failed(1));
  EXPECT_EQ(Resume(), absl::OkStatus());
}

TEST_F(LingeringRanksTest, AnotherProcessIsNotGivenTheStartOfRanksThatDied) {
  controller_->OnClosed(a_);
  EXPECT_TRUE(Witness("a.1").ok());
  ASSERT_EQ(Job().attempts(0).ranks(0).state(), v1::RankStatus::LOST);
  ASSERT_EQ(Job().attempts(0).ranks(2).state(), v1::RankStatus::STARTING);
  EXPECT_THAT(Connect("a", "a.2")->Commands(), IsEmpty());
  Restart();
  EXPECT_THAT(Connect("a", "a.2")->Commands(), IsEmpty()) << "it is not kept either";
}

TEST_F(LingeringRanksTest, AStartThatIsTakenUpAfterItsRanksWereGivenUpIsStopped) {
  a_->FallSilent();
  Pass(options_.lease * 2);
  Pass(options_.adoption_timeout);
  ASSERT_EQ(Job().attempts(0).ranks(0).state(), v1::RankStatus::LOST);
  ASSERT_EQ(Job().attempts(0).ranks(2).state(), v1::RankStatus::STARTING);
  a_->Commands();
  a_->HearAgain();
  Acknowledge(a_, 1, start_.command_id());
  ExpectStops(a_);
  EXPECT_THAT(Waits(1), HasSubstr("0 free")) << "they are in the way until they have ended";
  Say(a_, 2, Ready(0));
  EXPECT_THAT(a_->Commands(), IsEmpty()) << "it was told";
  Say(a_, 3, Failed(0));
  EXPECT_EQ(Waits(1), "");
}

TEST_F(LingeringRanksTest, ATrainerOfAnAttemptThatIsOverIsStopped) {
  a_->FallSilent();
  Pass(options_.lease * 2);
  Say(b_, 2, Failed(2));
  Say(b_, 3, Failed(3));
  Pass(options_.adoption_timeout);
  ASSERT_EQ(Job().attempts(0).ranks(0).state(), v1::RankStatus::LOST);
  a_->Commands();
  a_->HearAgain();
  Acknowledge(a_, 1, start_.command_id());
  EXPECT_THAT(a_->Commands(), IsEmpty());
  Say(a_, 2, Ready(1));
  ExpectStops(a_);
  EXPECT_THAT(Waits(4), HasSubstr("3 free"));
  Say(a_, 3, Failed(1));
  EXPECT_EQ(Waits(4), "");
}

TEST_F(LingeringRanksTest, AStartThatOneWorkerHasNotHeardKeepsNoOthersTrainersAlive) {
  controller_->OnClosed(b_);
  Connect("b", "b.2");
  EXPECT_EQ(Job().attempts(0).ranks(2).state(), v1::RankStatus::LOST);
  EXPECT_EQ(Job().attempts(0).ranks(3).state(), v1::RankStatus::LOST);
  EXPECT_EQ(Job().attempts(0).failure().rank(), 2);
  EXPECT_EQ(Job().attempts(0).ranks(0).state(), v1::RankStatus::STARTING);
}

}  // namespace
}  // namespace ringleader::lifecycle
