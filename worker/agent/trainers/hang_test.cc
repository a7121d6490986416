// Who is blamed when trainers stand still.
#include <gmock/gmock.h>
#include <signal.h>

#include "worker/agent/testing/supervised.h"

namespace ringleader::agent {
namespace {

constexpr absl::Duration kPulseTimeout = absl::Seconds(30), kHangTimeout = absl::Minutes(10);

class HangTest : public testing::SupervisedTest {
 protected:
  // Two ranks that have attached and say where they are.
  void SetUp() override {
    EXPECT_TRUE(Do(StartOf(7, 2)).accepted());
    for (uint32_t rank : {0, 1}) trainers_.push_back(Attach(7, rank));
  }
  // `by` passes in which both send pulses from the places given, and nobody is killed.
  void Pass(absl::Duration by, uint64_t first_step, uint64_t second_step,
            const std::string& phase = "backward") {
    for (const absl::Time end = now_ + by; now_ < end;) {
      now_ += std::min(absl::Seconds(10), end - now_);
      Pulse(trainers_[0], first_step, phase);
      Pulse(trainers_[1], second_step, phase);
      ExpectNothing();
    }
  }
  // Rank `first` stops in its step and the other one `apart` later in its own. They stand still for
  // as long as a hang takes, in which nobody is killed, and then a little longer.
  void StopOneAfterTheOther(uint32_t first, absl::Duration apart, const uint64_t (&steps)[2]) {
    Pulse(trainers_[first], steps[first]);
    now_ += apart;
    Pulse(trainers_[1 - first], steps[1 - first]);
    Pass(kHangTimeout - apart, steps[0], steps[1]);
    now_ += apart + absl::Seconds(1);
    for (uint32_t rank : {0, 1}) Pulse(trainers_[rank], steps[rank]);
  }
  // Expects that rank `rank` alone is killed at `now_`, with this reason.
  void ExpectBlamed(uint32_t rank, const std::string& reason) {
    const v1::TrainerExited exited = NextExit();
    EXPECT_EQ(exited.rank(), rank);
    EXPECT_EQ(exited.message(), reason);
    EXPECT_FALSE(exited.collateral());
    // The other one, which waited for it, finds out by itself.
    ExpectNothing();
    EXPECT_FALSE(testing::IsDying(PidOf(7, 1 - rank)));
  }

  std::vector<std::shared_ptr<testing::RecordingConnection>> trainers_;
};

TEST_F(HangTest, SilenceIsADeathWhoeverIsBehind) {
  Pulse(trainers_[0], 3);
  Pulse(trainers_[1], 4);
  const absl::Time last = now_;
  now_ += absl::Seconds(20);
  Pulse(trainers_[0], 3);  // the one with fewer steps speaks
  now_ = last + kPulseTimeout;
  ExpectNothing();
  now_ += absl::Milliseconds(1);
  ExpectBlamed(1, "no sign of life for 30s, last seen in step 4 (backward): killed");
}

TEST_F(HangTest, AnyMessageIsASignOfLife) {
  now_ += absl::Seconds(20);
  v1::TrainerMessage step;
  step.mutable_step()->set_step(1);
  for (const auto& trainer : trainers_) {
    supervisor_.OnTrainerMessage(trainer, step, now_);
    EXPECT_TRUE(Next().event().has_step());
  }
  now_ += absl::Seconds(20);
  ExpectNothing();
}

TEST_F(HangTest, TheRankThatIsFewestStepsAlongIsBlamed) {
  StopOneAfterTheOther(1, absl::Seconds(1), {4, 3});
  ExpectBlamed(1, "no progress for 10m in step 3 (backward): killed");
}

TEST_F(HangTest, TheRankThatIsFewestStepsAlongIsBlamedWhicheverItIs) {
  StopOneAfterTheOther(0, absl::Seconds(1), {3, 4});
  ExpectBlamed(0, "no progress for 10m in step 3 (backward): killed");
}

TEST_F(HangTest, FewestStepsCountMoreThanStandingStillForLonger) {
  StopOneAfterTheOther(0, absl::Seconds(5), {4, 3});
  ExpectBlamed(1, "no progress for 10m in step 3 (backward): killed");
}

TEST_F(HangTest, InTheSameStepTheOneThatStoodStillFirstIsBlamed) {
  StopOneAfterTheOther(1, absl::Seconds(1), {4, 4});
  ExpectBlamed(1, "no progress for 10m in step 4 (backward): killed");
}

TEST_F(HangTest, AnotherPhaseOrStepAndAReportAreProgress) {
  Pass(absl::Seconds(30), 4, 4, "forward");
  Pass(kHangTimeout - absl::Seconds(10), 4, 4, "backward");
  Pass(kHangTimeout - absl::Seconds(20), 5, 5);
  v1::TrainerMessage step;
  step.mutable_step()->set_step(5);
  for (const auto& trainer : trainers_) {
    supervisor_.OnTrainerMessage(trainer, step, now_);
    Next();
  }
  Pass(kHangTimeout, 5, 5);
}

// An evaluation, or reading a large file.
TEST_F(HangTest, APhaseMayTakeLongAsLongAsItGetsOn) {
  const absl::Time end = now_ + 3 * kHangTimeout;
  for (uint64_t progress = 1; now_ < end; now_ += absl::Seconds(20)) {
    for (const auto& trainer : trainers_) {
      v1::TrainerMessage message;
      message.mutable_pulse()->set_step(4);
      message.mutable_pulse()->set_phase("evaluation");
      // A part of it takes a while, too.
      message.mutable_pulse()->set_progress(progress++ / 20);
      supervisor_.OnTrainerMessage(trainer, message, now_);
    }
    ExpectNothing();
  }
}

TEST_F(HangTest, StandingStillCountsFromAttaching) {
  Pass(kHangTimeout, 0, 0, "");
  now_ += absl::Seconds(1);
  for (const auto& trainer : trainers_) Pulse(trainer, 0, "");
  ExpectBlamed(0, "no progress for 10m in step 0 (): killed");
}

TEST_F(HangTest, WhileTheWorkerStandsStillNobodyIsSilent) {
  for (const auto& trainer : trainers_) Pulse(trainer, 4);
  now_ += absl::Hours(1) + kPulseTimeout;
  supervisor_.StoodStill(absl::Hours(1));
  ExpectNothing();
  Pulse(trainers_[1], 4);
  now_ += absl::Milliseconds(1);
  ExpectBlamed(0, "no sign of life for 30s, last seen in step 4 (backward): killed");
}

TEST_F(HangTest, NorIsAnyoneWithoutProgress) {
  for (const auto& trainer : trainers_) Pulse(trainer, 4);
  now_ += absl::Hours(1);
  supervisor_.StoodStill(absl::Hours(1));
  Pass(kHangTimeout, 4, 4);
  now_ += absl::Milliseconds(1);
  for (const auto& trainer : trainers_) Pulse(trainer, 4);
  ExpectBlamed(0, "no progress for 10m in step 4 (backward): killed");
}

TEST_F(HangTest, WhoWasToldToLeaveIsNotJudged) {
  EXPECT_TRUE(Do(StopOf(7, v1::StopTrainers::CHECKPOINT, 3'600'000)).accepted());
  now_ += absl::Minutes(30);
  ExpectNothing();
}

TEST_F(HangTest, WhoHungUpAndLivesOnIs) {
  Pulse(trainers_[0], 4);
  supervisor_.OnTrainerGone(trainers_[0]);
  now_ += kPulseTimeout;
  Pulse(trainers_[1], 4);
  ExpectNothing();
  now_ += absl::Milliseconds(1);
  ExpectBlamed(0, "no sign of life for 30s, last seen in step 4 (backward): killed");
}

class UnattachedTest : public testing::SupervisedTest {};

TEST_F(UnattachedTest, WhoHasNotAttachedIsNotJudged) {
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  PidOf(7, 0);
  supervisor_.StoodStill(absl::Hours(1));
  now_ += absl::Hours(24);
  ExpectNothing();
}

}  // namespace
}  // namespace ringleader::agent
