#include "coordinator/trace/attempt_spans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "coordinator/trace/testing/traced_job.h"

namespace ringleader::trace {
namespace {

using otlp::Span;
using testing::BeReady;
using testing::Checkpoint;
using ::testing::ElementsAre;
using testing::End;
using ::testing::IsSupersetOf;
using testing::Place;
using testing::Step;
using testing::Train;
using testing::WaitingJob;
using v1::Attempt;

// "name begin..end", in seconds since the test began.
std::string Text(const Span& span) {
  const auto seconds = [](uint64_t nanoseconds) {
    return absl::ToDoubleSeconds(absl::FromUnixNanos(static_cast<int64_t>(nanoseconds)) -
                                 testing::At(0));
  };
  return absl::StrCat(span.name(), " ", seconds(span.start_time_unix_nano()), "..",
                      seconds(span.end_time_unix_nano()));
}

std::vector<std::string> Texts(const std::vector<Span>& spans) {
  std::vector<std::string> texts;
  for (const Span& span : spans) texts.push_back(Text(span));
  return texts;
}

std::set<std::string> Attributes(const Span& span) {
  std::set<std::string> texts;
  for (const otlp::KeyValue& attribute : span.attributes()) {
    const otlp::AnyValue& value = attribute.value();
    texts.insert(absl::StrCat(attribute.key(), "=", value.string_value(),
                              value.has_int_value() ? absl::StrCat(value.int_value()) : "",
                              value.has_double_value() ? absl::StrCat(value.double_value()) : ""));
  }
  return texts;
}

TEST(AttemptSpansTest, APhaseIsThereWhenItIsOver) {
  v1::Job job = WaitingJob("a", "a-1");
  Attempt& attempt = *Place(0, &job);
  EXPECT_THAT(Texts(FinishedSpans(job, attempt, nullptr)), ElementsAre("queue 0..3", "place 3..4"));
  BeReady(10, &attempt);
  Train(Step(1, 17), &attempt);
  EXPECT_THAT(Texts(FinishedSpans(job, attempt, nullptr)),
              ElementsAre("queue 0..3", "place 3..4", "start 4..10", "load 10..15"));
  End(Attempt::SUCCEEDED, "", 60, &attempt);
  const std::vector<Span> spans = FinishedSpans(job, attempt, nullptr);
  ASSERT_EQ(Text(spans.back()), "attempt 0..60");
  EXPECT_THAT(Attributes(spans.back()),
              IsSupersetOf({"ringleader.job=a", "ringleader.job.uid=a-1", "ringleader.attempt=1",
                            "ringleader.owner=alice", "ringleader.outcome=SUCCEEDED",
                            "ringleader.ranks=4", "ringleader.nodes=1", "ringleader.last_step=1"}));
  EXPECT_EQ(spans.back().status().code(), otlp::Status::UNSET);
}

TEST(AttemptSpansTest, AllSpansAreOfOneTraceUnderItsRoot) {
  v1::Job job = WaitingJob("a", "a-1");
  Attempt& attempt = *Place(0, &job);
  BeReady(10, &attempt);
  Train(Step(1, 17), &attempt);
  End(Attempt::SUCCEEDED, "", 60, &attempt);
  std::vector<Span> spans = FinishedSpans(job, attempt, nullptr);
  const Span root = spans.back();
  spans.pop_back();
  for (const uint64_t step : {1, 2}) spans.push_back(StepSpan(job, attempt, Step(step, 17)));
  for (const uint64_t step : {1, 2}) spans.push_back(CheckpointSpan(job, Checkpoint(step, 20, 1)));
  EXPECT_EQ(root.trace_id().size(), 16u);
  EXPECT_EQ(root.parent_span_id(), "");
  std::set<std::string> ids = {root.span_id()};
  for (const Span& span : spans) {
    EXPECT_EQ(span.trace_id(), root.trace_id()) << span.name();
    EXPECT_EQ(span.parent_span_id(), root.span_id()) << span.name();
    EXPECT_EQ(span.span_id().size(), 8u);
    EXPECT_TRUE(ids.insert(span.span_id()).second) << span.name();
  }
  job.set_uid("a-2");
  EXPECT_NE(FinishedSpans(job, attempt, nullptr).back().trace_id(), root.trace_id());
  job.set_uid("a-1");
  attempt.set_number(2);
  EXPECT_NE(FinishedSpans(job, attempt, nullptr).back().trace_id(), root.trace_id());
}

TEST(AttemptSpansTest, AFailureEndsThePhaseThatItFell) {
  v1::Job job = WaitingJob("a", "a-1");
  Attempt& attempt = *Place(0, &job);
  BeReady(10, &attempt);
  End(Attempt::FAILED, "rank 1 on nodes/b: no such file", 12, &attempt);
  const std::vector<Span> spans = FinishedSpans(job, attempt, nullptr);
  EXPECT_THAT(Texts(spans), ElementsAre("queue 0..3", "place 3..4", "start 4..10", "load 10..12",
                                        "attempt 0..12"));
  for (const size_t i : {3, 4}) {
    EXPECT_EQ(spans[i].status().code(), otlp::Status::ERROR);
    EXPECT_EQ(spans[i].status().message(), "rank 1 on nodes/b: no such file");
  }
  EXPECT_EQ(spans[2].status().code(), otlp::Status::UNSET);
}

TEST(AttemptSpansTest, RecoveryLastsFromTheFailureToTheNextStep) {
  v1::Job job = WaitingJob("a", "a-1");
  Attempt* first = Place(0, &job);
  BeReady(10, first);
  Train(Step(1, 17), first);
  Train(Step(9, 33), first);
  End(Attempt::FAILED, "killed by signal 9", 40, first);
  Attempt& second = *Place(50, &job);
  first = job.mutable_attempts(0);
  EXPECT_THAT(Texts(FinishedSpans(job, second, first)),
              ElementsAre("queue 50..53", "place 53..54"));
  BeReady(60, &second);
  Train(Step(6, 67), &second);
  std::vector<Span> spans = FinishedSpans(job, second, first);
  ASSERT_EQ(Text(spans.back()), "recover 40..65");
  EXPECT_THAT(Attributes(spans.back()),
              IsSupersetOf({"ringleader.failure=killed by signal 9", "ringleader.steps_lost=4"}));
  End(Attempt::SUCCEEDED, "", 90, &second);
  spans = FinishedSpans(job, second, first);
  EXPECT_EQ(Text(spans.back()), "attempt 40..90");
  ASSERT_EQ(spans.back().links_size(), 1);
  const Span before = FinishedSpans(job, *first, nullptr).back();
  EXPECT_EQ(spans.back().links(0).trace_id(), before.trace_id());
  EXPECT_EQ(spans.back().links(0).span_id(), before.span_id());
}

TEST(AttemptSpansTest, WhoWasPausedDoesNotRecover) {
  v1::Job job = WaitingJob("a", "a-1");
  End(Attempt::PAUSED, "", 40, Place(0, &job));
  Attempt& second = *Place(1000, &job);
  End(Attempt::SUCCEEDED, "", 1010, &second);
  EXPECT_THAT(Texts(FinishedSpans(job, second, &job.attempts(0))),
              ElementsAre("queue 1000..1003", "place 1003..1004", "start 1004..1010",
                          "attempt 1000..1010"));
}

TEST(AttemptSpansTest, AStepSaysWhereItsTimeWent) {
  v1::Job job = WaitingJob("a", "a-1");
  const Span span = StepSpan(job, *Place(0, &job), Step(7, 20));
  EXPECT_EQ(Text(span), "step 18..20");
  EXPECT_THAT(Attributes(span),
              IsSupersetOf({"ringleader.step=7", "ringleader.tokens=4096", "ringleader.loss=2.5",
                            "ringleader.phase.linear=0.5"}));
  EXPECT_EQ(Text(CheckpointSpan(job, Checkpoint(7, 20, 1))), "checkpoint 19..20");
}

TEST(AttemptSpansTest, NoSpanEndsBeforeItBeginsWhateverClocksSay) {
  v1::Job job = WaitingJob("a", "a-1");
  Attempt& attempt = *Place(0, &job);
  BeReady(10, &attempt);
  Train(Step(1, -500), &attempt);
  v1::StepReport endless = Step(1, 5);
  endless.set_step_seconds(1e300);
  for (const Span& span : FinishedSpans(job, attempt, nullptr)) {
    EXPECT_LE(span.start_time_unix_nano(), span.end_time_unix_nano()) << span.name();
  }
  const Span span = StepSpan(job, attempt, endless);
  EXPECT_EQ(span.start_time_unix_nano(), 0u);
  EXPECT_GT(span.end_time_unix_nano(), 0u);
}

}  // namespace
}  // namespace ringleader::trace
