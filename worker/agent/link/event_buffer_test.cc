#include "worker/agent/link/event_buffer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/boot_clock.h"
#include "base/net/message_size.h"
#include "base/testing/equals_text.h"

namespace ringleader::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::LogLine Line(const std::string& text, int32_t rank = 0) {
  v1::LogLine line;
  line.set_rank(rank);
  line.set_text(text);
  return line;
}

class EventBufferTest : public ::testing::Test {
 protected:
  std::optional<v1::WorkerMessage> Next(uint64_t after) {
    return buffer_.Next(after, absl::ZeroDuration());
  }
  void PushStep(uint64_t step) {
    v1::WorkerMessage message;
    message.mutable_event()->mutable_step()->set_step(step);
    buffer_.Push(std::move(message));
  }

  EventBuffer buffer_{100};
};

TEST_F(EventBufferTest, NumbersWithoutGapsAndKeepsUntilAcknowledged) {
  for (uint64_t step = 1; step <= 3; ++step) PushStep(step);
  EXPECT_EQ(Next(0)->sequence(), 1);
  EXPECT_EQ(Next(0)->sequence(), 1);  // it may have to be sent again
  EXPECT_EQ(Next(2)->event().step().step(), 3);
  EXPECT_FALSE(Next(3));
  buffer_.Acknowledge(2);
  EXPECT_EQ(buffer_.size(), 1);
  EXPECT_EQ(Next(0)->sequence(), 3);
  PushStep(4);
  EXPECT_EQ(Next(3)->sequence(), 4);
  buffer_.Acknowledge(1);  // late
  EXPECT_EQ(buffer_.acknowledged(), 2);
  buffer_.Acknowledge(100);
  EXPECT_TRUE(buffer_.empty());
  EXPECT_EQ(buffer_.acknowledged(), 4);
}

TEST_F(EventBufferTest, ReportsThatDoNotFitGoWithoutTheirLayers) {
  EventBuffer buffer(100, 1000);
  v1::WorkerMessage message;
  v1::StepReport* const step = message.mutable_event()->mutable_step();
  step->set_loss(2.5);
  for (uint32_t layer = 0; layer < 10; ++layer) {
    step->add_layers()->set_layer(layer);
    step->mutable_layers(static_cast<int>(layer))->set_density(0.5);
  }
  for (int i = 0; i < 1000; ++i) buffer.Push(message);
  size_t with_layers = 0;
  for (uint64_t after = 0; after < 1000; ++after) {
    const v1::WorkerMessage kept = *buffer.Next(after, absl::ZeroDuration());
    EXPECT_EQ(kept.event().step().loss(), 2.5);
    if (kept.event().step().layers_size() > 0) ++with_layers;
  }
  EXPECT_GT(with_layers, 0u);
  EXPECT_LT(with_layers, 100u);
  // Room again once they are acknowledged.
  buffer.Acknowledge(1000);
  buffer.Push(message);
  EXPECT_EQ(buffer.Next(1000, absl::ZeroDuration())->event().step().layers_size(), 10);
}

// Days without a word of room: steps are thinned out alike on all workers, nothing else goes, and
// what may have been sent stays as it was.
TEST_F(EventBufferTest, StepsThinOutWhenNothingCanBeSent) {
  EventBuffer buffer(100, 1000, 64);
  const auto push_step = [&](uint64_t step) {
    v1::WorkerMessage message;
    message.mutable_event()->mutable_step()->set_step(step);
    buffer.Push(std::move(message));
  };
  for (uint64_t step = 1; step <= 3; ++step) push_step(step);
  EXPECT_EQ(buffer.Next(1, absl::ZeroDuration())->event().step().step(), 2u);  // 1 and 2 are out
  for (uint64_t step = 4; step <= 1000; ++step) {
    push_step(step);
    if (step % 100 != 0) continue;
    v1::WorkerMessage other;
    other.mutable_event()->mutable_eval()->set_step(step);
    buffer.Push(std::move(other));
  }
  std::vector<uint64_t> steps, evals;
  const size_t size = buffer.size();
  EXPECT_LE(size, 2u + 64u);
  for (uint64_t sequence = 0; sequence < size; ++sequence) {
    const v1::WorkerMessage message = *buffer.Next(sequence, absl::ZeroDuration());
    EXPECT_EQ(message.sequence(), sequence + 1);
    if (message.event().has_step()) steps.push_back(message.event().step().step());
    if (message.event().has_eval()) evals.push_back(message.event().eval().step());
  }
  EXPECT_THAT(evals, ElementsAre(100, 200, 300, 400, 500, 600, 700, 800, 900, 1000));
  ASSERT_GT(steps.size(), 30u);
  EXPECT_EQ(steps[0], 1u);
  EXPECT_EQ(steps[1], 2u);
  for (size_t i = 2; i < steps.size(); ++i) EXPECT_EQ(steps[i], 32 * (i - 1)) << i;
  EXPECT_EQ(buffer.dropped_step_reports() + steps.size(), 1000u);
  // Everything is out: every step is reported again.
  buffer.Acknowledge(size);
  push_step(1001);
  EXPECT_EQ(buffer.Next(size, absl::ZeroDuration())->event().step().step(), 1001u);
}

// Logs have a bound of their own. Where there is no step left to drop, nothing is thinned further.
TEST_F(EventBufferTest, NoStepGoesToMakeRoomForLogs) {
  EventBuffer buffer(1 << 20, 1000, 64);
  const auto push = [&](uint64_t step) {
    v1::WorkerMessage message;
    message.mutable_event()->mutable_step()->set_step(step);
    buffer.Push(std::move(message));
  };
  for (int i = 0; i < 100; ++i) buffer.PushLogs({}, {Line("a line for itself")});
  for (uint64_t step = 1; step <= 60; ++step) push(step);
  EXPECT_EQ(buffer.dropped_step_reports(), 0);
  // So many evaluations that the stride, doubled with each, would be 2^64.
  for (int i = 0; i < 200; ++i) {
    v1::WorkerMessage other;
    other.mutable_event()->mutable_eval();
    buffer.Push(std::move(other));
  }
  push(61);
  const uint64_t dropped = buffer.dropped_step_reports();
  EXPECT_LE(dropped, 61u);
  EXPECT_EQ(buffer.size(), 100u + 200 + 61 - dropped);
  while (!buffer.empty()) {
    EXPECT_TRUE(buffer.Next(buffer.acknowledged(), absl::ZeroDuration()).has_value());
    buffer.Acknowledge(buffer.acknowledged() + 1);
  }
  push(63);
  EXPECT_EQ(buffer.size(), 1);
}

TEST_F(EventBufferTest, DropsLogsButNothingElseAndMarksTheGap) {
  const std::string text(90, 'x');
  buffer_.PushLogs({}, {Line(text), Line(text), Line(text)});
  for (uint64_t step = 1; step <= 50; ++step) PushStep(step);
  EXPECT_EQ(buffer_.size(), 51);  // with two lines: the second was begun below the bound
  buffer_.PushLogs({}, {Line("lost")});
  EXPECT_EQ(buffer_.dropped_log_lines(), 2);
  buffer_.Acknowledge(51);
  buffer_.PushLogs({}, {Line("after")});
  const v1::LogBatch logs = Next(51)->event().logs();
  ASSERT_EQ(logs.lines_size(), 2);
  EXPECT_THAT(logs.lines(0).text(), HasSubstr("2 lines were dropped here"));
  EXPECT_EQ(logs.lines(1).text(), "after");
}

TEST_F(EventBufferTest, AFullBufferTakesNoFurtherLine) {
  EventBuffer buffer(2 * Line("x").ByteSizeLong());
  buffer.PushLogs({}, {Line("x"), Line("x"), Line("x")});
  EXPECT_EQ(buffer.Next(0, absl::ZeroDuration())->event().logs().lines_size(), 2);
  EXPECT_EQ(buffer.dropped_log_lines(), 1u);
}

TEST_F(EventBufferTest, GapsAreCountedByRank) {
  buffer_.PushLogs({}, {Line(std::string(200, 'x'), 0)});
  buffer_.PushLogs({}, {Line("lost", 1)});
  buffer_.Acknowledge(1);
  buffer_.PushLogs({}, {Line("whole", 0), Line("after", 1)});
  std::vector<std::string> texts;
  const v1::LogBatch logs = Next(1)->event().logs();
  for (const v1::LogLine& line : logs.lines()) texts.push_back(line.text());
  EXPECT_THAT(texts, ElementsAre("whole", HasSubstr("1 lines were dropped"), "after"));
}

// Two jobs each have a rank 0.
TEST_F(EventBufferTest, AGapIsToldInTheLogOfItsOwnAttempt) {
  v1::AttemptEvent one, other;
  one.set_fencing_token(1);
  other.set_fencing_token(2);
  buffer_.PushLogs(one, {Line(std::string(200, 'x'))});
  buffer_.PushLogs(one, {Line("lost")});
  buffer_.Acknowledge(1);
  buffer_.PushLogs(other, {Line("whole")});
  buffer_.PushLogs(one, {Line("after")});
  EXPECT_EQ(Next(1)->event().logs().lines(0).text(), "whole");
  EXPECT_THAT(Next(2)->event().logs().lines(0).text(), HasSubstr("1 lines were dropped"));
}

// Hours of them: what a coordinator that is away for less misses is told whole.
TEST_F(EventBufferTest, AHundredThousandStepsWaitBeforeAnyGoes) {
  constexpr uint64_t kUnsent = 100'000;
  for (uint64_t step = 1; step <= kUnsent; ++step) PushStep(step);
  EXPECT_EQ(buffer_.dropped_step_reports(), 0u);
  PushStep(kUnsent + 1);
  EXPECT_EQ(buffer_.dropped_step_reports(), kUnsent / 2 + 1);
}

TEST_F(EventBufferTest, ByDefaultSixtyFourMebibytesOfLayersWait) {
  v1::WorkerMessage message;
  v1::LayerReport* const layer = message.mutable_event()->mutable_step()->add_layers();
  for (int i = 0; i < 200'000; ++i) layer->add_tiles_per_ring_step(~0U);
  const uint64_t fit = (uint64_t{64} << 20) / layer->ByteSizeLong();
  for (uint64_t i = 0; i <= fit; ++i) buffer_.Push(message);
  EXPECT_EQ(Next(fit - 1)->event().step().layers_size(), 1);
  EXPECT_EQ(Next(fit)->event().step().layers_size(), 0);
}

TEST_F(EventBufferTest, NextWaitsForAMessageAndCanBeWoken) {
  std::thread pusher([&] { PushStep(1); });
  EXPECT_EQ(buffer_.Next(0, absl::Seconds(20)).value_or(v1::WorkerMessage()).sequence(), 1);
  pusher.join();
  std::thread waker([&] { buffer_.Wake(); });
  EXPECT_FALSE(buffer_.Next(1, absl::Hours(1)));
  waker.join();
}

TEST_F(EventBufferTest, NextWaitsAsLongAsItIsTold) {
  const absl::Duration patience = absl::Milliseconds(30);
  absl::Time begin = BootNow();
  EXPECT_FALSE(buffer_.Next(0, patience));
  EXPECT_GE(BootNow() - begin, patience);
  // A wake-up ends one wait. Were it to end all that follow, a lost session would cost a core.
  buffer_.Wake();
  EXPECT_FALSE(buffer_.Next(0, absl::Hours(1)));
  begin = BootNow();
  EXPECT_FALSE(buffer_.Next(0, patience));
  EXPECT_GE(BootNow() - begin, patience);
}

TEST_F(EventBufferTest, TheMarkOfAGapIsALineOfItsRankAndSaidOnce) {
  v1::AttemptEvent event;
  event.set_job("job");
  event.set_attempt(2);
  event.set_fencing_token(7);
  buffer_.PushLogs(event, {Line(std::string(200, 'x'), 3)});
  buffer_.PushLogs(event, {Line("lost", 3)});
  buffer_.Acknowledge(1);
  v1::LogLine line = Line("after", 3);
  line.mutable_time()->set_seconds(9);
  buffer_.PushLogs(event, {line, Line("next", 3)});
  EXPECT_THAT(*Next(1), EqualsText(R"(
    sequence: 2
    event { job: "job" attempt: 2 fencing_token: 7 logs {
      lines { rank: 3 time { seconds: 9 } is_stderr: true
              text: "[1 lines were dropped here: the coordinator was away, or too slow]" }
      lines { rank: 3 time { seconds: 9 } text: "after" }
      lines { rank: 3 text: "next" } } })"));
}

// Layers have room for two reports' here.
class LayersTest : public ::testing::Test {
 protected:
  static v1::WorkerMessage Step(uint64_t step, int layers) {
    v1::WorkerMessage message;
    message.mutable_event()->mutable_step()->set_step(step);
    for (int i = 0; i < layers; ++i) {
      message.mutable_event()->mutable_step()->add_layers()->set_density(0.5);
    }
    return message;
  }
  int LayersOf(uint64_t sequence) {
    return buffer_.Next(sequence - 1, absl::ZeroDuration())->event().step().layers_size();
  }

  const size_t one_ = Step(1, 1).event().step().layers(0).ByteSizeLong();
  EventBuffer buffer_{100, 20 * one_, /*max_unsent=*/4};
};

TEST_F(LayersTest, WhatWentWithoutThemTakesNoRoom) {
  buffer_.Push(Step(1, 15));
  buffer_.Push(Step(2, 15));
  buffer_.Push(Step(3, 5));
  EXPECT_EQ(LayersOf(1), 15);
  EXPECT_EQ(LayersOf(2), 0);
  EXPECT_EQ(LayersOf(3), 5) << "exactly as much as there is room for";
  buffer_.Push(Step(4, 1));
  EXPECT_EQ(LayersOf(4), 0);
  buffer_.Acknowledge(2);
  buffer_.Push(Step(5, 15));
  EXPECT_EQ(LayersOf(5), 15);
}

// Of five that were never sent every second goes; one was sent and acknowledged before.
TEST_F(LayersTest, StepsThatAreThinnedOutMakeRoom) {
  buffer_.Push(Step(1, 0));
  EXPECT_EQ(LayersOf(1), 0);
  buffer_.Acknowledge(1);
  for (uint64_t step = 2; step <= 6; ++step) buffer_.Push(Step(step, 4));
  EXPECT_EQ(buffer_.dropped_step_reports(), 2u) << "3 and 5";
  EXPECT_EQ(buffer_.size(), 3u);
  buffer_.Push(Step(8, 8));
  const uint64_t expected[][2] = {{2, 4}, {4, 4}, {6, 4}, {8, 8}};
  for (uint64_t i = 0; i < 4; ++i) {
    const v1::WorkerMessage message = *buffer_.Next(i + 1, absl::ZeroDuration());
    EXPECT_EQ(message.sequence(), i + 2);
    EXPECT_EQ(message.event().step().step(), expected[i][0]);
    EXPECT_EQ(message.event().step().layers_size(), static_cast<int>(expected[i][1]));
  }
}

// The coordinator knows of them from an earlier session: they need not be sent.
TEST_F(LayersTest, WhatIsAcknowledgedUnsentNoLongerWaits) {
  for (uint64_t step = 1; step <= 4; ++step) buffer_.Push(Step(step, 0));
  buffer_.Acknowledge(4);
  for (uint64_t step = 5; step <= 8; ++step) buffer_.Push(Step(step, 0));
  EXPECT_EQ(buffer_.dropped_step_reports(), 0u);
  buffer_.Push(Step(9, 0));
  EXPECT_EQ(buffer_.dropped_step_reports(), 3u) << "5, 7 and 9";
}

// A message that the coordinator refuses for its size would end every session.
TEST_F(EventBufferTest, AStepReportThatIsTooLargeToSendGoesWithoutItsLayers) {
  EventBuffer buffer(1000);
  v1::WorkerMessage message;
  message.mutable_event()->mutable_step()->set_step(1);
  v1::LayerReport* const layer = message.mutable_event()->mutable_step()->add_layers();
  for (size_t i = 0; i < kMaxLayerBytes; ++i) layer->add_tiles_per_ring_step(1);
  buffer.Push(message);
  const auto sent = buffer.Next(0, absl::ZeroDuration());
  ASSERT_TRUE(sent.has_value());
  EXPECT_EQ(sent->event().step().step(), 1u);
  EXPECT_LT(sent->ByteSizeLong(), 100u);
}

}  // namespace
}  // namespace ringleader::agent
