#include "coordinator/trace/trace_book.h"

#include <gmock/gmock.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/store/testing/damage.h"
#include "coordinator/store/testing/opened_store.h"
#include "coordinator/trace/testing/traced_job.h"

namespace ringleader::trace {
namespace {

using testing::BeReady;
using testing::Checkpoint;
using ::testing::ElementsAre;
using testing::End;
using ::testing::IsEmpty;
using testing::Place;
using testing::Step;
using testing::Train;
using testing::WaitingJob;
using v1::Attempt;

class TraceBookTest : public store::testing::OpenedStoreTest {
 protected:
  // Another coordinator takes over.
  void Restart() {
    book_.emplace(absl::Seconds(60));
    adopted_.clear();
    const absl::Status adopted =
        store_->Read([&](store::ReadTransaction& t) { return book_->Adopt(t, since_, &adopted_); });
    EXPECT_TRUE(adopted.ok()) << adopted;
  }
  std::vector<std::string> AdoptedNames() const {
    std::vector<std::string> names;
    for (const otlp::Span& span : adopted_) names.push_back(span.name());
    return names;
  }

  void Create() {
    Write([&](store::WriteTransaction& t) { return t.CreateJob(&job_); });
  }
  // Writes the job down with what came of it.
  void Save(const std::vector<v1::StepReport>& steps = {},
            const std::vector<v1::CheckpointNotice>& checkpoints = {}) {
    Write([&](store::WriteTransaction& t) -> absl::Status {
      for (const Attempt& attempt : job_.attempts()) t.PutAttempt("a", attempt).IgnoreError();
      for (const v1::StepReport& step : steps) t.PutStep("a", step).IgnoreError();
      for (const v1::CheckpointNotice& notice : checkpoints) {
        job_.mutable_progress()->set_checkpoint_step(notice.step());
        t.PutCheckpoint("a", notice).IgnoreError();
      }
      return t.UpdateJob(&job_);
    });
  }
  // "attempt's trace: name", "+step" for those that there are many of.
  std::vector<std::string> Collect() {
    std::vector<otlp::Span> spans;
    const absl::Status collected =
        store_->Read([&](store::ReadTransaction& t) { return book_->Collect(t, "a", &spans); });
    EXPECT_TRUE(collected.ok()) << collected;
    std::vector<std::string> texts;
    for (const otlp::Span& span : spans) {
      std::string text = span.name();
      for (const otlp::KeyValue& attribute : span.attributes()) {
        if (attribute.key() == "ringleader.attempt") {
          text = absl::StrCat(attribute.value().int_value(), ": ", text);
        }
        if (attribute.key() == "ringleader.step") {
          absl::StrAppend(&text, " ", attribute.value().int_value());
        }
      }
      texts.push_back(text);
    }
    return texts;
  }

  v1::Job job_ = WaitingJob("a", "a-1");
  std::optional<TraceBook> book_{absl::Seconds(60)};
  absl::Time since_ = absl::InfiniteFuture();
  std::vector<otlp::Span> adopted_;  // what was over at the last restart
};

// Before, a coordinator that traces did not start.
TEST_F(TraceBookTest, WhatIsDamagedIsNobodyElsesAffair) {
  Create();
  Train(Step(1, 17), Place(0, &job_));
  Save({Step(1, 17)});
  for (const char* id : {"b", "c", "d"}) {
    Write([&](store::WriteTransaction& t) {
      v1::Job job = WaitingJob(id, id);
      t.CreateJob(&job).IgnoreError();
      Train(Step(1, 17), Place(0, &job));
      t.PutStep(id, Step(1, 17)).IgnoreError();
      return t.PutAttempt(id, job.attempts(0));
    });
  }
  store::testing::DamageRecord(options_.path, "jobs", "id = 'b'");
  store::testing::DamageRecord(options_.path, "attempts", "job = 'c'");
  store::testing::DamageRecord(options_.path, "steps", "job = 'd'");
  Restart();
  EXPECT_THAT(AdoptedNames(), ElementsAre("step", "queue", "place"));
  EXPECT_THAT(Collect(), IsEmpty());
}

TEST_F(TraceBookTest, EachSpanIsHandedOutOnce) {
  Create();
  EXPECT_THAT(Collect(), IsEmpty());
  Attempt& attempt = *Place(0, &job_);
  Save();
  EXPECT_THAT(Collect(), ElementsAre("1: queue", "1: place"));
  EXPECT_THAT(Collect(), IsEmpty());
  BeReady(10, &attempt);
  Train(Step(1, 17), &attempt);
  Save({Step(1, 17)});
  EXPECT_THAT(Collect(), ElementsAre("1: step 1", "1: start", "1: load"));
  Train(Step(2, 19), &attempt);
  Save({Step(2, 19)}, {Checkpoint(2, 21, 1)});
  EXPECT_THAT(Collect(), ElementsAre("1: checkpoint 2"));
  End(Attempt::SUCCEEDED, "", 60, &attempt);
  job_.set_state(v1::Job::SUCCEEDED);
  Save();
  EXPECT_THAT(Collect(), ElementsAre("1: attempt"));
  EXPECT_THAT(Collect(), IsEmpty()) << "late words of a job that has ended";
}

TEST_F(TraceBookTest, AStepAMinuteIsEnough) {
  Create();
  Attempt& attempt = *Place(0, &job_);
  BeReady(10, &attempt);
  std::vector<std::string> steps;
  for (uint64_t step = 1; step <= 100; ++step) {
    const v1::StepReport report = Step(step, 10 + 2.0 * static_cast<double>(step));
    Train(report, &attempt);
    Save({report});
    for (const std::string& text : Collect()) {
      if (text.find("step") != std::string::npos) steps.push_back(text);
    }
  }
  EXPECT_THAT(steps, ElementsAre("1: step 1", "1: step 31", "1: step 61", "1: step 91"));
}

TEST_F(TraceBookTest, ARestartedCoordinatorGoesOnWhereTheOtherWas) {
  Create();
  Attempt& attempt = *Place(0, &job_);
  BeReady(10, &attempt);
  Train(Step(1, 17), &attempt);
  Save({Step(1, 17)}, {Checkpoint(1, 18, 1)});
  EXPECT_THAT(Collect(), ElementsAre("1: step 1", "1: checkpoint 1", "1: queue", "1: place",
                                     "1: start", "1: load"));
  Restart();
  EXPECT_THAT(AdoptedNames(), ElementsAre("step", "checkpoint", "queue", "place", "start", "load"));
  EXPECT_THAT(Collect(), IsEmpty());
  Train(Step(50, 100), &attempt);
  End(Attempt::SUCCEEDED, "", 110, &attempt);
  Save({Step(50, 100)}, {Checkpoint(50, 101, 1)});
  EXPECT_THAT(Collect(), ElementsAre("1: step 50", "1: checkpoint 50", "1: attempt"));
}

// What it ended with may not have been sent.
TEST_F(TraceBookTest, ARestartedCoordinatorKnowsTheJobsThatEndedLately) {
  Create();
  End(Attempt::FAILED, "no", 20, Place(0, &job_));
  job_.set_state(v1::Job::FAILED);
  SetTime(testing::At(20), job_.mutable_end_time());
  Save();
  since_ = testing::At(19);
  Restart();
  EXPECT_THAT(AdoptedNames(), ElementsAre("queue", "place", "start", "attempt"));
  EXPECT_THAT(Collect(), IsEmpty());
  since_ = testing::At(20);
  Restart();
  EXPECT_THAT(AdoptedNames(), IsEmpty());
  EXPECT_THAT(Collect(), IsEmpty());
}

TEST_F(TraceBookTest, TheNextAttemptHasATraceOfItsOwn) {
  Create();
  Attempt* const first = Place(0, &job_);
  End(Attempt::FAILED, "no", 20, first);
  job_.set_state(v1::Job::RETRYING);
  Save();
  EXPECT_THAT(Collect(), ElementsAre("1: queue", "1: place", "1: start", "1: attempt"));
  Attempt& second = *Place(30, &job_);
  BeReady(40, &second);
  Train(Step(1, 47), &second);
  Save({Step(1, 47)});
  EXPECT_THAT(Collect(), ElementsAre("2: step 1", "2: queue", "2: place", "2: start", "2: load",
                                     "2: recover"));
}

TEST_F(TraceBookTest, AJobThatEndedAndGoesOnRepeatsNothing) {
  Create();
  End(Attempt::FAILED, "no", 20, Place(0, &job_));
  job_.set_state(v1::Job::FAILED);
  Save();
  EXPECT_THAT(Collect(), ElementsAre("1: queue", "1: place", "1: start", "1: attempt"));
  for (const bool restarted : {false, true}) {
    if (restarted) Restart();
    job_.set_state(v1::Job::PENDING);
    Save();
    EXPECT_THAT(Collect(), IsEmpty());
    End(Attempt::FAILED, "no", 50, Place(30, &job_));
    job_.set_state(v1::Job::FAILED);
    Save();
    const std::string number = restarted ? "3" : "2";
    EXPECT_THAT(Collect(), ElementsAre(number + ": queue", number + ": place", number + ": start",
                                       number + ": recover", number + ": attempt"));
  }
}

// The second went on from a checkpoint before the one that the first saved last.
TEST_F(TraceBookTest, StepsThatAreSavedAgainAreSpansAgain) {
  Create();
  Attempt* const first = Place(0, &job_);
  BeReady(10, first);
  Train(Step(100, 17), first);
  End(Attempt::FAILED, "no", 20, first);
  job_.set_state(v1::Job::RETRYING);
  Save({Step(100, 17)}, {Checkpoint(100, 18, 1)});
  EXPECT_THAT(Collect(), ::testing::Contains("1: checkpoint 100"));
  Attempt& second = *Place(30, &job_);
  BeReady(40, &second);
  Train(Step(76, 47), &second);
  Save({Step(76, 47)}, {Checkpoint(75, 46, 2)});
  job_.mutable_progress()->set_checkpoint_step(100);  // the most that was ever saved
  Save();
  EXPECT_THAT(Collect(), ::testing::Contains("2: checkpoint 75"));
}

// What has ended before it was looked at is handed out, in whatever order jobs come.
TEST_F(TraceBookTest, AJobThatEndsAtOnceHasItsTrace) {
  v1::Job other = WaitingJob("b", "b-1");
  Create();
  Write([&](store::WriteTransaction& t) { return t.CreateJob(&other); });
  End(Attempt::FAILED, "no", 20, Place(0, &job_));
  job_.set_state(v1::Job::FAILED);
  Save();
  std::vector<otlp::Span> of_other;
  ASSERT_TRUE(
      store_->Read([&](store::ReadTransaction& t) { return book_->Collect(t, "b", &of_other); })
          .ok());
  EXPECT_THAT(Collect(), ElementsAre("1: queue", "1: place", "1: start", "1: attempt"));
}

TEST_F(TraceBookTest, AJobOfTheSameNameIsAnother) {
  for (const char* uid : {"a-1", "a-2"}) {
    job_ = WaitingJob("a", uid);
    Create();
    Place(0, &job_);
    Save();
    EXPECT_THAT(Collect(), ElementsAre("1: queue", "1: place")) << uid;
    Write([](store::WriteTransaction& t) { return t.DeleteJob("a"); });
    const bool seen_to_go = job_.uid() == std::string("a-1");
    if (seen_to_go) {
      EXPECT_THAT(Collect(), IsEmpty());
    }
  }
}

}  // namespace
}  // namespace ringleader::trace
