// The time by which history goes leaps nowhere, whatever the time of day does.
#include "coordinator/store/upkeep/history_time.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/fake_clock.h"
#include "coordinator/store/testing/damage.h"
#include "coordinator/store/testing/forwarding_store.h"
#include "coordinator/store/testing/opened_store.h"
#include "coordinator/store/upkeep/backup.h"
#include "coordinator/store/upkeep/retention.h"
#include "proto/timestamps.h"

namespace ringleader::store {
namespace {

constexpr absl::Duration kDay = absl::Hours(24);

class HistoryTimeTest : public testing::OpenedStoreTest {
 protected:
  HistoryTimeTest() { Start(); }

  // A process starts.
  void Start() {
    time_ = std::make_unique<HistoryTime>(store_.get(), &time_of_day_, &steady_);
    ASSERT_EQ(time_->Begin(), absl::OkStatus());
  }
  // So long after, by both clocks.
  absl::Time AdvanceAfter(absl::Duration duration) {
    time_of_day_.Advance(duration);
    steady_.Advance(duration);
    const absl::StatusOr<absl::Time> time = time_->Advance();
    EXPECT_TRUE(time.ok()) << time.status();
    return *time;
  }
  // By how much it is behind the time of day then.
  absl::Duration BehindAfter(absl::Duration duration) {
    const absl::Time time = AdvanceAfter(duration);
    return time_of_day_.Now() - time;
  }
  // A job that was created, and ended, so long ago by the time of day.
  void AddJob(const std::string& id, absl::Duration ago) {
    Write([&](WriteTransaction& t) {
      v1::Job job;
      job.set_name("jobs/" + id);
      job.mutable_spec()->set_name(id);
      job.set_state(v1::Job::SUCCEEDED);
      SetTime(time_of_day_.Now() - ago, job.mutable_create_time());
      SetTime(time_of_day_.Now() - ago, job.mutable_end_time());
      return t.CreateJob(&job);
    });
  }
  bool Has(const std::string& id) {
    return store_->Read([&](ReadTransaction& t) { return t.GetJob(id).status(); }).ok();
  }

  FakeClock time_of_day_, steady_;
  std::unique_ptr<HistoryTime> time_;
};

TEST_F(HistoryTimeTest, ThereIsNoneBeforeThereIsHistory) {
  EXPECT_EQ(AdvanceAfter(kDay), absl::InfinitePast());
  AddJob("a", absl::ZeroDuration());
  EXPECT_EQ(BehindAfter(absl::Hours(1)), absl::ZeroDuration());
}

// Whatever is damaged of the newest records, those before say how old the history is.
TEST_F(HistoryTimeTest, ADamagedRecordKeepsItFromNothing) {
  AddJob("a", kDay * 3);
  AddJob("b", kDay * 2);
  AddJob("c", kDay);
  Write([](WriteTransaction& t) { return t.AppendAudit(v1::AuditRecord()); });
  for (const char* id : {"b", "c"}) {
    testing::DamageRecord(options_.path, "jobs", absl::StrCat("id = '", id, "'"));
  }
  testing::DamageRecord(options_.path, "audit");
  Start();
  EXPECT_EQ(BehindAfter(absl::ZeroDuration()), kDay * 3);
}

TEST_F(HistoryTimeTest, CallsThatWereNotedAreHistoryToo) {
  const auto note = [this](absl::Duration ago) {
    Write([&](WriteTransaction& t) {
      v1::AuditRecord record;
      SetTime(time_of_day_.Now() - ago, record.mutable_time());
      return t.AppendAudit(record);
    });
  };
  note(kDay * 3);
  AddJob("a", kDay * 4);
  Start();
  EXPECT_EQ(BehindAfter(absl::ZeroDuration()), kDay * 3);
}

TEST_F(HistoryTimeTest, WhatPassedWhileNothingCouldBeWrittenIsMadeGood) {
  class RefusingStore : public testing::ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    absl::Status Write(absl::FunctionRef<absl::Status(WriteTransaction&)> body,
                       Need need) override {
      return writes-- > 0 ? ForwardingStore::Write(body, need) : absl::UnavailableError("not now");
    }
    int writes = 100;  // before it refuses them
  };
  AddJob("a", absl::ZeroDuration());
  RefusingStore store(store_.get());
  time_ = std::make_unique<HistoryTime>(&store, &time_of_day_, &steady_);
  EXPECT_EQ(BehindAfter(absl::Hours(1)), absl::ZeroDuration());
  time_of_day_.Advance(kDay * 10);
  steady_.Advance(absl::Hours(1));
  store.writes = 1;
  EXPECT_EQ(time_->Advance().status(), absl::UnavailableError("not now"));
  store.writes = 100;
  steady_.Advance(absl::Hours(1));
  EXPECT_EQ(BehindAfter(absl::ZeroDuration()), kDay * 10 - absl::Hours(4));
  time_.reset();
}

TEST_F(HistoryTimeTest, RecordsOfAClockThatWasAheadAllowNoLeap) {
  AddJob("a", -kDay * 3650);
  Start();
  const absl::Time start = time_of_day_.Now();
  time_of_day_.Advance(kDay * 3650);
  EXPECT_LE(AdvanceAfter(absl::Hours(1)), start + absl::Hours(2));
}

TEST_F(HistoryTimeTest, FollowsTheTimeOfDay) {
  AddJob("a", absl::ZeroDuration());
  Start();
  for (int hour = 0; hour < 48; ++hour) {
    EXPECT_EQ(BehindAfter(absl::Hours(1)), absl::ZeroDuration()) << hour;
  }
}

// Before, an hour sufficed to lose all history by a clock that was ahead.
TEST_F(HistoryTimeTest, AClockThatIsAheadForDaysDeletesHistoryOfAsManyDays) {
  const RetentionOptions options = {.events = kDay * 90, .jobs = kDay * 90};
  AddJob("old", kDay * 88);
  AddJob("younger", kDay * 80);
  AddJob("new", kDay);
  const absl::Time start = time_of_day_.Now();
  time_of_day_.Advance(kDay * 3650);
  for (int day = 0; day < 3; ++day) {
    Start();  // by itself that changes nothing
    for (int hour = 0; hour < 24; ++hour) {
      ASSERT_TRUE(DeleteOld(*store_, AdvanceAfter(absl::Hours(1)), options).ok());
    }
  }
  EXPECT_FALSE(Has("old"));  // its time has come
  EXPECT_TRUE(Has("younger"));
  EXPECT_LE(*time_->Advance(), start + kDay * 6);
  // Once the clock is mended it counts at once, and an error of the same size later moves no more.
  time_of_day_.Advance(-kDay * 3650);
  EXPECT_EQ(BehindAfter(absl::Hours(1)), absl::ZeroDuration());
  for (int hour = 0; hour < 100; ++hour) AdvanceAfter(absl::Hours(1));
  time_of_day_.Advance(kDay * 3650);
  EXPECT_LE(AdvanceAfter(absl::Hours(1)), start + kDay * 8);
  EXPECT_TRUE(Has("new"));
}

TEST_F(HistoryTimeTest, WhatPassedWhileNoCoordinatorRanIsMadeGood) {
  AddJob("a", absl::ZeroDuration());
  Start();
  AdvanceAfter(absl::Hours(1));
  time_of_day_.Advance(kDay * 10);  // a machine that was off has no steady clock
  Start();
  EXPECT_EQ(BehindAfter(kDay), kDay * 9);
  for (int day = 0; day < 8; ++day) AdvanceAfter(kDay);
  EXPECT_EQ(BehindAfter(kDay), absl::ZeroDuration());
}

TEST_F(HistoryTimeTest, AClockThatWasBehindDelaysItAsLong) {
  AddJob("a", absl::ZeroDuration());
  Start();
  AdvanceAfter(kDay);
  time_of_day_.Advance(-kDay * 3650);
  EXPECT_EQ(BehindAfter(absl::Hours(1)), absl::ZeroDuration());
  time_of_day_.Advance(kDay * 3650);
  EXPECT_EQ(BehindAfter(absl::Hours(1)), absl::Hours(2));
  AdvanceAfter(absl::Hours(1));
  EXPECT_EQ(BehindAfter(absl::Hours(1)), absl::ZeroDuration());
}

// Its numbers go far ahead, but not its time.
TEST_F(HistoryTimeTest, ABackupKeepsIt) {
  AddJob("a", absl::ZeroDuration());
  Start();
  const absl::Time before = AdvanceAfter(absl::Hours(1));
  const std::string copy = dir_.File("copy");
  ASSERT_EQ(BackUp(options_.path, copy), absl::OkStatus());
  const auto restored = OpenSqliteStore({.path = copy});
  ASSERT_TRUE(restored.ok()) << restored.status();
  const absl::Status read = (*restored)->Read([&](ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(const absl::Time kept, t.GetHistoryTime());
    EXPECT_EQ(kept, before);
    return absl::OkStatus();
  });
  EXPECT_EQ(read, absl::OkStatus());
}

}  // namespace
}  // namespace ringleader::store
