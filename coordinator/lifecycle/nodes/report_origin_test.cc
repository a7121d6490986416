// What a worker reports counts only where it can know it: of attempts that have ranks on its node,
// of these ranks, and of steps that the job has.
#include <cstdint>
#include <limits>

#include "coordinator/lifecycle/testing/controller_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Job j with ranks 0 and 1 on node a, and 2 and 3 on b; c has none.
class ReportOriginTest : public testing::ControllerTest {
 protected:
  ReportOriginTest() {
    a_ = Connect("a", "a.1");
    b_ = Connect("b", "b.1");
    EXPECT_TRUE(Do([&] { return controller_->CreateJob(Spec("j", 4), {}); }).ok());
    controller_->RunOnce();
    c_ = Connect("c", "c.1");
    start_of_a_ = a_->Commands().at(0);
    token_ = start_of_a_.fencing_token();
    EXPECT_EQ(start_of_a_.start().first_rank(), 0u);
    EXPECT_EQ(b_->Commands().at(0).start().first_rank(), 2u);
  }
  void AllReady() {
    Say(a_, 1, Ready(0));
    Say(a_, 2, Ready(1));
    Say(b_, 1, Ready(2));
    Say(b_, 2, Ready(3));
    ASSERT_EQ(Job().state(), v1::Job::RUNNING);
  }
  v1::RankStatus::State StateOf(int rank) { return Job().attempts(0).ranks(rank).state(); }
  static v1::AttemptEvent Exited(uint32_t rank) {
    v1::AttemptEvent event;
    event.mutable_trainer_exited()->set_rank(rank);
    event.mutable_trainer_exited()->set_outcome(v1::TrainerExited::FAILED);
    event.mutable_trainer_exited()->set_exit_code(1);
    event.mutable_trainer_exited()->set_retryable(true);
    return event;
  }

  std::shared_ptr<testing::FakeSession> a_, b_, c_;
  v1::Command start_of_a_;
};

TEST_F(ReportOriginTest, ExitsOfOtherNodesRanksAreIgnored) {
  AllReady();
  Say(b_, 3, Exited(0));
  Say(c_, 1, Exited(1));
  Say(b_, 4, Exited(77));
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  EXPECT_EQ(StateOf(0), v1::RankStatus::READY);
  EXPECT_EQ(StateOf(1), v1::RankStatus::READY);
  // They count as received, or the worker would send them for ever.
  EXPECT_EQ(b_->acknowledged(), 4u);
  Say(a_, 3, Exited(0));
  EXPECT_EQ(StateOf(0), v1::RankStatus::FAILED);
}

TEST_F(ReportOriginTest, ReadinessOfOtherNodesRanksIsIgnored) {
  Say(b_, 1, Ready(0));
  Say(c_, 1, Ready(1));
  Say(b_, 2, Ready(4'000'000'000));
  EXPECT_EQ(StateOf(0), v1::RankStatus::STARTING);
  Say(a_, 1, Ready(0));
  EXPECT_EQ(StateOf(0), v1::RankStatus::READY);
  EXPECT_EQ(Job().attempts(0).ranks(0).address(), "host:1");
}

TEST_F(ReportOriginTest, MeasurementsAreOfRankZerosNodeAndChecked) {
  EXPECT_EQ(start_of_a_.start().measure().budget_milliseconds(), 7000u);
  v1::AttemptEvent event;
  v1::LatencyTable* const layers = event.mutable_measurements()->mutable_layers();
  layers->mutable_machine()->set_device("believed");
  layers->mutable_shape()->set_pattern("dense");
  layers->add_rows()->set_p50_ms(5);
  Say(b_, 1, event);
  Say(c_, 1, event);
  EXPECT_THAT(plans_.measured->tables, IsEmpty());
  Say(a_, 1, event);
  ASSERT_THAT(plans_.measured->tables, SizeIs(1));
  EXPECT_EQ(plans_.measured->tables[0].rows(0).p50_ms(), 5);
  layers->mutable_machine()->set_device("made up");
  Say(a_, 2, event);
  EXPECT_THAT(plans_.measured->tables, SizeIs(1));
  EXPECT_EQ(a_->acknowledged(), 2u);
  plans_.measured = nullptr;
  Restart();
  ASSERT_THAT(plans_.measured->tables, SizeIs(1));
  EXPECT_EQ(plans_.measured->tables[0].machine().device(), "believed");
}

TEST_F(ReportOriginTest, StepsOfOtherNodesRanksAndOfNoJobAreIgnored) {
  AllReady();
  Say(a_, 3, Step(1, 0));
  Say(a_, 4, Step(1, 1));
  Say(b_, 3, Step(1, 2));
  Say(a_, 5, Step(1, 3));  // b's
  Say(b_, 4, Step(1, -1));
  EXPECT_THAT(Steps(), IsEmpty());
  Say(b_, 5, Step(1, 3));
  EXPECT_THAT(Steps(), ElementsAre(1));
  for (const uint64_t step : {uint64_t{11}, std::numeric_limits<uint64_t>::max()}) {
    v1::AttemptEvent checkpoint;
    checkpoint.mutable_checkpoint()->set_step(step);
    v1::AttemptEvent eval;
    eval.mutable_eval()->set_step(step);
    Say(a_, a_->acknowledged() + 1, checkpoint);
    Say(a_, a_->acknowledged() + 1, eval);
    Say(a_, a_->acknowledged() + 1, Step(step, 0));
  }
  EXPECT_EQ(Job().progress().checkpoint_step(), 0u);
  EXPECT_FALSE(Job().has_last_eval());
  EXPECT_EQ(a_->acknowledged(), 11u);
}

TEST_F(ReportOriginTest, WhatRankZeroReportsComesFromItsNode) {
  AllReady();
  v1::AttemptEvent checkpoint;
  checkpoint.mutable_checkpoint()->set_step(3);
  v1::AttemptEvent eval;
  eval.mutable_eval()->set_step(3);
  v1::AttemptEvent exported;
  exported.mutable_model_exported()->set_path("/elsewhere");
  Say(b_, 3, checkpoint);
  Say(b_, 4, eval);
  Say(b_, 5, exported);
  EXPECT_EQ(Job().progress().checkpoint_step(), 0u);
  EXPECT_FALSE(Job().has_last_eval());
  EXPECT_EQ(Job().model_directory(), "");
  Say(a_, 3, checkpoint);
  EXPECT_EQ(Job().progress().checkpoint_step(), 3u);
}

TEST_F(ReportOriginTest, FiguresThatAreNoneAreIgnored) {
  AllReady();
  constexpr int64_t kLastSecond = 253'402'300'799;  // of the year 9999
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto with = [](auto set) {
    v1::AttemptEvent event = Step(1, 0);
    set(event.mutable_step());
    return event;
  };
  uint64_t sequence = 2;
  Say(a_, ++sequence, with([&](auto* step) { step->set_loss(nan); }));
  Say(a_, ++sequence, with([&](auto* step) { step->set_gradient_norm(nan); }));
  Say(a_, ++sequence, with([&](auto* step) { step->set_learning_rate(nan); }));
  for (const double seconds : {-1.0, std::numeric_limits<double>::infinity()}) {
    Say(a_, ++sequence, with([&](auto* step) { step->set_step_seconds(seconds); }));
  }
  Say(a_, ++sequence, with([&](auto* step) { step->set_step(0); }));
  // Times that JSON has no words for.
  for (const int64_t seconds : {int64_t{-1}, kLastSecond + 1, int64_t{1} << 60}) {
    Say(a_, ++sequence, with([&](auto* step) { step->mutable_time()->set_seconds(seconds); }));
  }
  for (const int32_t nanos : {-1, 1'000'000'000}) {
    Say(a_, ++sequence, with([&](auto* step) { step->mutable_time()->set_nanos(nanos); }));
  }
  Say(a_, ++sequence, Step(1, 1));
  Say(b_, 3, Step(1, 2));
  Say(b_, 4, Step(1, 3));
  EXPECT_THAT(Steps(), IsEmpty());
  // A step that was skipped for its loss says so, and counts.
  Say(a_, ++sequence, with([&](auto* step) {
        step->set_loss(nan);
        step->set_skipped(true);
        step->mutable_time()->set_seconds(kLastSecond);
        step->mutable_time()->set_nanos(999'999'999);
      }));
  EXPECT_THAT(Steps(), ElementsAre(1));
}

// What is kept of a job grows with what trainers have to say, whatever a node sends.
TEST_F(ReportOriginTest, ReportsOfNoSizeThatATrainerHasAreIgnored) {
  AllReady();
  const auto step = [](auto fill) {
    v1::AttemptEvent event = Step(1, 0);
    fill(event.mutable_step());
    return event;
  };
  v1::AttemptEvent eval;
  eval.mutable_eval()->set_step(1);
  eval.mutable_eval()->add_answers()->set_task(std::string(16 << 10, 'x'));
  v1::AttemptEvent checkpoint;
  checkpoint.mutable_checkpoint()->set_step(1);
  checkpoint.mutable_checkpoint()->set_path("/" + std::string(4096, 'x'));
  v1::AttemptEvent exported;
  exported.mutable_model_exported()->set_path("/" + std::string(4096, 'x'));
  uint64_t sequence = 2;
  for (const v1::AttemptEvent& event :
       {eval, checkpoint, exported, step([](v1::StepReport* report) {
          for (int i = 0; i < 1025; ++i) report->add_layers();
        }),
        step([](v1::StepReport* report) {
          for (int i = 0; i < 65; ++i) report->add_lengths();
        }),
        step([](v1::StepReport* report) {
          for (int i = 0; i < 65; ++i) report->add_documents();
        }),
        step([](v1::StepReport* report) {
          for (int i = 0; i < 2; ++i) {
            report->add_layers()->mutable_probed_recall_by_head()->Resize((64 << 10) + i, 1);
          }
        }),
        step([](v1::StepReport* report) { report->add_layers()->set_layer(1024); }),
        // A ring has a step for each of the four ranks.
        step([](v1::StepReport* report) {
          report->add_layers()->mutable_tiles_per_ring_step()->Resize(5, 1);
        }),
        // Of all ranks, which none can know.
        step([](v1::StepReport* report) { report->add_rank_paces(1); }),
        step([](v1::StepReport* report) { report->add_rank_tiles(1); })}) {
    Say(a_, ++sequence, event);
  }
  Say(a_, ++sequence, Step(1, 1));
  Say(b_, 3, Step(1, 2));
  Say(b_, 4, Step(1, 3));
  EXPECT_THAT(Steps(), IsEmpty());
  EXPECT_FALSE(Job().has_last_eval());
  EXPECT_EQ(Job().progress().checkpoint_step(), 0u);
  EXPECT_EQ(Job().model_directory(), "");
  Say(a_, ++sequence, step([](v1::StepReport* report) {
        for (uint32_t i = 0; i < 1024; ++i) {
          v1::LayerReport* const layer = report->add_layers();
          layer->set_layer(i);
          layer->mutable_tiles_per_ring_step()->Resize(4, 1);
        }
        for (int i = 0; i < 64; ++i) {
          report->add_lengths();
          report->add_documents();
        }
      }));
  EXPECT_THAT(Steps(), ElementsAre(1));
  EXPECT_EQ(a_->acknowledged(), sequence);
}

// JSON has no words for others: a line would take all those of its page from whoever reads JSON.
TEST_F(ReportOriginTest, LinesHaveTimes) {
  AllReady();
  v1::AttemptEvent late = Log("late");
  late.mutable_logs()->mutable_lines(0)->mutable_time()->set_seconds(int64_t{1} << 60);
  Say(a_, 3, late);
  Say(a_, 4, Log("now"));
  EXPECT_THAT(LogTexts(), ElementsAre("now"));
}

// It stands in the record of the job, once for each attempt.
TEST_F(ReportOriginTest, ARefusalIsToldShortly) {
  v1::WorkerMessage message;
  message.set_sequence(1);
  message.mutable_command_ack()->set_command_id(start_of_a_.command_id());
  message.mutable_command_ack()->set_message(std::string(1 << 20, 'x'));
  controller_->OnMessage(a_, message);
  controller_->RunOnce();
  ASSERT_TRUE(Job().attempts(0).has_failure());
  EXPECT_LT(Job().ByteSizeLong(), 20'000u);
}

TEST_F(ReportOriginTest, ANodeWithoutRanksHasNothingToSayOfTheJob) {
  AllReady();
  v1::AttemptEvent checkpoint;
  checkpoint.mutable_checkpoint()->set_step(3);
  Say(c_, 1, checkpoint);
  v1::AttemptEvent exported;
  exported.mutable_model_exported()->set_path("/elsewhere");
  Say(c_, 2, exported);
  Say(c_, 3, Log("forged"));
  EXPECT_EQ(Job().progress().checkpoint_step(), 0u);
  EXPECT_EQ(Job().model_directory(), "");
  EXPECT_THAT(LogTexts(), IsEmpty());
  Say(b_, 3, Log("of rank 0, which is a's"));
  EXPECT_THAT(LogTexts(), IsEmpty());
  Say(a_, 3, Log("true"));
  EXPECT_THAT(LogTexts(), ElementsAre("true"));
}

TEST_F(ReportOriginTest, TrainersLearnWhoseCertificateEachRankHas) {
  AllReady();
  const std::string of_a = "uri ringleader://node/a", of_b = "uri ringleader://node/b";
  for (const auto& session : {a_, b_}) {
    const std::vector<v1::Command> commands = session->Commands();
    ASSERT_THAT(commands, SizeIs(1));
    EXPECT_THAT(commands[0].connect().certificates(), ElementsAre(of_a, of_a, of_b, of_b));
  }
}

TEST_F(ReportOriginTest, PathsWithControlCharactersAreIgnored) {
  AllReady();
  v1::AttemptEvent checkpoint;
  checkpoint.mutable_checkpoint()->set_step(3);
  checkpoint.mutable_checkpoint()->set_path("/checkpoints/\x1b[2Jstep-3");
  Say(a_, 3, checkpoint);
  v1::AttemptEvent exported;
  exported.mutable_model_exported()->set_path("/checkpoints/\nmodel");
  Say(a_, 4, exported);
  EXPECT_EQ(Job().progress().checkpoint_step(), 0u);
  EXPECT_EQ(Job().model_directory(), "");
  exported.mutable_model_exported()->set_path("/checkpoints/model");
  Say(a_, 5, exported);
  EXPECT_EQ(Job().model_directory(), "/checkpoints/model");
}

TEST_F(ReportOriginTest, WhatAnEarlierAttemptMeasuredOrExportedIsIgnored) {
  AllReady();
  Say(a_, 3, Exited(0));
  Say(a_, 4, Exited(1));
  Say(b_, 3, Exited(2));
  Say(b_, 4, Exited(3));
  clock_.Advance(options_.retry_backoff);
  controller_->RunOnce();
  ASSERT_EQ(Job().attempts_size(), 2);
  v1::AttemptEvent measured;
  v1::LatencyTable* const layers = measured.mutable_measurements()->mutable_layers();
  layers->mutable_machine()->set_device("believed");
  layers->add_rows()->set_p50_ms(5);
  v1::AttemptEvent exported;
  exported.mutable_model_exported()->set_path("/elsewhere");
  Say(a_, 5, measured);
  Say(a_, 6, exported);
  EXPECT_THAT(plans_.measured->tables, IsEmpty());
  EXPECT_EQ(Job().model_directory(), "");
  EXPECT_EQ(a_->acknowledged(), 6u);
}

TEST_F(ReportOriginTest, AddressesThatAreNoneAreIgnored) {
  uint64_t sequence = 0;
  for (const std::string& address : {std::string(257, 'h'), std::string("host:1\033[2J")}) {
    v1::AttemptEvent ready = Ready(0);
    ready.mutable_trainer_ready()->set_address(address);
    Say(a_, ++sequence, ready);
    EXPECT_EQ(StateOf(0), v1::RankStatus::STARTING) << address;
  }
  Say(a_, ++sequence, Ready(0));
  EXPECT_EQ(StateOf(0), v1::RankStatus::READY);
}

TEST_F(ReportOriginTest, LinesOfAnotherJobOfTheNameAreIgnored) {
  AllReady();
  token_ += 100;
  Say(a_, 3, Log("of a job that had the name before"));
  EXPECT_THAT(LogTexts(), IsEmpty());
}

TEST_F(ReportOriginTest, ACommandIsAcknowledgedByTheNodeThatItWasSentTo) {
  Acknowledge(b_, 1, start_of_a_.command_id());
  // It comes again with a's next session, for a has not acknowledged it.
  auto again = Connect("a", "a.1");
  EXPECT_THAT(again->Commands(), SizeIs(1));
  Acknowledge(again, 1, start_of_a_.command_id());
  EXPECT_THAT(Connect("a", "a.1")->Commands(), IsEmpty());
}

TEST_F(ReportOriginTest, TrainersThatBelongElsewhereAreStopped) {
  AllReady();
  v1::RunningAttempt claimed;
  claimed.set_job("j");
  claimed.set_attempt(1);
  claimed.set_fencing_token(token_);
  claimed.add_ranks(0);
  for (const std::string node : {"c", "b"}) {  // b has others
    const std::vector<v1::Command> commands = Connect(node, node + ".1", {claimed})->Commands();
    ASSERT_FALSE(commands.empty()) << node;
    EXPECT_EQ(commands[0].stop().mode(), v1::StopTrainers::ABORT) << node;
    EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  }
}

// Of a job that had the name before, and was deleted while its worker was away.
TEST_F(ReportOriginTest, TrainersOfAnotherAttemptOfTheNumberAreStopped) {
  AllReady();
  v1::RunningAttempt claimed;
  claimed.set_job("j");
  claimed.set_attempt(1);
  claimed.set_fencing_token(token_ + 7);
  claimed.add_ranks(0);
  int stops = 0;
  for (const v1::Command& command : Connect("a", "a.1", {claimed}, 2)->Commands()) {
    if (!command.has_stop()) continue;
    ++stops;
    EXPECT_EQ(command.fencing_token(), token_ + 7);
  }
  EXPECT_EQ(stops, 1);
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
}

// The planner hears of a step once all ranks have told of it.
TEST_F(ReportOriginTest, ThePlannerHearsOfWholeSteps) {
  AllReady();
  for (const int32_t rank : {0, 1}) Say(a_, 3 + static_cast<uint64_t>(rank), Step(1, rank));
  Say(b_, 3, Step(1, 2));
  EXPECT_THAT(plans_.observed, IsEmpty());
  Say(b_, 4, Step(1, 3));
  EXPECT_THAT(plans_.observed, ElementsAre(1));
}

TEST_F(ReportOriginTest, ARestartedCoordinatorHandsThePlannerPlanAndReports) {
  AllReady();
  for (const uint64_t step : {1, 2}) {
    const uint64_t next = 2 * step;
    Say(a_, next + 1, Step(step, 0));
    Say(a_, next + 2, Step(step, 1));
    Say(b_, next + 1, Step(step, 2));
    Say(b_, next + 2, Step(step, 3));
  }
  EXPECT_THAT(Steps(), ElementsAre(1, 2));
  EXPECT_EQ(plans_.restored, std::nullopt);
  Restart();
  ASSERT_TRUE(plans_.restored.has_value());
  EXPECT_EQ(plans_.restored->version(), 1u);
  ASSERT_THAT(plans_.restored_on, SizeIs(2)) << "nodes of its attempt";
  EXPECT_EQ(plans_.restored_on[0].trainers(), 2u);
  EXPECT_EQ(plans_.restored_on[1].trainers(), 2u);
  ASSERT_THAT(plans_.relearned, SizeIs(2));
  EXPECT_EQ(plans_.relearned[1].step(), 2u);
}

TEST_F(ReportOriginTest, ARestartedCoordinatorHandsThePlannerNoMoreThanTheLastReports) {
  AllReady();
  const absl::Status written = sqlite_->Write([&](store::WriteTransaction& t) {
    v1::StepReport report;
    for (uint64_t step = 1; step <= 200; ++step) {
      report.set_step(step);
      EXPECT_EQ(t.PutStep("j", report), absl::OkStatus());
    }
    v1::Job job = *t.GetJob("j");
    job.mutable_progress()->set_step(200);
    return t.UpdateJob(&job);
  });
  ASSERT_EQ(written, absl::OkStatus());
  Restart();
  ASSERT_THAT(plans_.relearned, SizeIs(128));
  EXPECT_EQ(plans_.relearned.front().step(), 73u);
  EXPECT_EQ(plans_.relearned.back().step(), 200u);
}

}  // namespace
}  // namespace ringleader::lifecycle
