#include "coordinator/trace/delivery_log.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/testing/temp_dir.h"

namespace ringleader::trace {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1'000'000);

// A span of this id (8 bytes) that ended so many seconds after kStart.
otlp::Span Span(const std::string& id, double end) {
  otlp::Span span;
  span.set_span_id(id);
  span.set_end_time_unix_nano(
      static_cast<uint64_t>(absl::ToUnixNanos(kStart + absl::Seconds(end))));
  return span;
}

std::vector<SpanEnd> Ends(const std::vector<otlp::Span>& spans) {
  std::vector<SpanEnd> ends;
  for (const otlp::Span& span : spans) ends.push_back({span.span_id(), span.end_time_unix_nano()});
  return ends;
}

absl::Time After(double seconds) {
  return kStart + absl::Seconds(seconds);
}

class DeliveryLogTest : public ::testing::Test {
 protected:
  DeliveryLog Open(double now = 0) {
    absl::StatusOr<DeliveryLog> log = DeliveryLog::Open(path_, After(now));
    EXPECT_TRUE(log.ok()) << log.status();
    return log.ok() ? *std::move(log) : DeliveryLog(path_, After(now));
  }

  const TempDir dir_;
  const std::string path_ = dir_.File("traces-sent");
};

TEST_F(DeliveryLogTest, WhatWasOverBeforeTheFirstLogIsDone) {
  const DeliveryLog log = Open(100);
  EXPECT_TRUE(log.IsDone(Span("aaaaaaaa", 100)));
  EXPECT_FALSE(log.IsDone(Span("bbbbbbbb", 101)));
}

TEST_F(DeliveryLogTest, TheNextLogKnowsWhatWasSettledAndNoMore) {
  const otlp::Span sent = Span("aaaaaaaa", 1), waits = Span("bbbbbbbb", 2);
  DeliveryLog log = Open();
  log.Handed(Ends({sent, waits}), 2, After(1));
  ASSERT_TRUE(log.Settle(1, After(3)).ok());
  EXPECT_TRUE(log.waits());
  DeliveryLog next = Open();
  EXPECT_TRUE(next.IsDone(sent));
  EXPECT_FALSE(next.IsDone(waits)) << "nobody has sent it";
  EXPECT_FALSE(next.IsDone(Span("cccccccc", 1))) << "what was never handed over";
  ASSERT_TRUE(log.Settle(2, After(3)).ok());
  EXPECT_FALSE(log.waits());
  EXPECT_TRUE(Open().IsDone(waits));
}

TEST_F(DeliveryLogTest, WhatWasDroppedIsDone) {
  const otlp::Span taken = Span("aaaaaaaa", 1), dropped = Span("bbbbbbbb", 2);
  DeliveryLog log = Open();
  log.Handed(Ends({taken, dropped}), 1, After(1));
  ASSERT_TRUE(log.Settle(0, After(3)).ok());
  EXPECT_TRUE(Open().IsDone(dropped)) << "it was counted";
  EXPECT_FALSE(Open().IsDone(taken));
}

// Ids are kept for as long as late words may come; what waits holds the mark back.
TEST_F(DeliveryLogTest, TheMarkFollowsAMinuteBehindWhatIsComplete) {
  DeliveryLog log = Open();
  log.Handed(Ends({Span("aaaaaaaa", 1)}), 1, After(500));
  log.Handed(Ends({Span("bbbbbbbb", 2)}), 1, After(1000));
  ASSERT_TRUE(log.Settle(1, After(2000)).ok());
  EXPECT_EQ(log.mark(), After(1000) - DeliveryLog::kLate);
  ASSERT_TRUE(log.Settle(2, After(2000)).ok());
  EXPECT_EQ(log.mark(), After(2000) - DeliveryLog::kLate);
  EXPECT_EQ(Open().mark(), log.mark());
  EXPECT_EQ(ReadFile(path_)->find("6262626262626262"), std::string::npos) << "below the mark";
  EXPECT_TRUE(Open().IsDone(Span("bbbbbbbb", 2)));
}

TEST_F(DeliveryLogTest, NothingIsWrittenWithoutNews) {
  DeliveryLog log = Open();
  ASSERT_TRUE(log.Settle(0, After(1)).ok());
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(DeliveryLogTest, ADamagedFileIsNamed) {
  DeliveryLog log = Open();
  log.Handed(Ends({Span("aaaaaaaa", 100)}), 1, After(1));
  ASSERT_TRUE(log.Settle(1, After(2)).ok());
  const std::string whole = *ReadFile(path_);
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string text = whole;
    text[i] = static_cast<char>(text[i] ^ 1);
    ASSERT_TRUE(WriteFileAtomically(path_, text).ok());
    const absl::Status status = DeliveryLog::Open(path_, kStart).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << i << ": " << status;
    EXPECT_NE(std::string(status.message()).find(path_), std::string::npos);
  }
  ASSERT_TRUE(WriteFileAtomically(path_, std::string()).ok());
  EXPECT_TRUE(absl::IsDataLoss(DeliveryLog::Open(path_, kStart).status()));
}

// Written once; today's code reads it, and writes the same.
TEST_F(DeliveryLogTest, ReadsTheGoldenFileAndWritesTheSameBytes) {
  const std::string golden = *ReadFile("tests/golden/traces-sent");
  ASSERT_TRUE(WriteFileAtomically(path_, golden).ok());
  EXPECT_TRUE(Open().IsDone(Span("aaaaaaaa", 100)));
  EXPECT_FALSE(Open().IsDone(Span("cccccccc", 100)));
  std::filesystem::remove(path_);
  DeliveryLog log = Open();
  log.Handed(Ends({Span("aaaaaaaa", 100), Span("bbbbbbbb", 101.5)}), 2, After(90));
  ASSERT_TRUE(log.Settle(2, After(110)).ok());
  EXPECT_EQ(*ReadFile(path_), golden);
}

}  // namespace
}  // namespace ringleader::trace
