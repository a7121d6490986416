// What the record of a job comes to, and how long it stays.
#include "coordinator/store/upkeep/retention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ringbuffer_sink.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/fake_clock.h"
#include "base/testing/temp_dir.h"
#include "coordinator/store/sqlite/sqlite_store.h"
#include "coordinator/store/testing/damage.h"
#include "coordinator/store/testing/forwarding_store.h"
#include "coordinator/store/upkeep/history_time.h"
#include "proto/timestamps.h"

namespace ringleader::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kDay = absl::Hours(24);

class RetentionTest : public ::testing::Test {
 protected:
  RetentionTest() {
    auto store = OpenSqliteStore({.path = dir_.File("db"), .clock = &clock_});
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  void Write(absl::FunctionRef<absl::Status(WriteTransaction&)> body) {
    const absl::Status status = store_->Write(body);
    ASSERT_TRUE(status.ok()) << status;
  }
  // `ended` ago; zero: it runs.
  void AddJob(const std::string& id, v1::Job::State state, absl::Duration ended) {
    Write([&](WriteTransaction& t) -> absl::Status {
      v1::Job job;
      job.set_name("jobs/" + id);
      job.mutable_spec()->set_name(id);
      job.set_state(state);
      SetTime(clock_.Now() - ended, job.mutable_create_time());
      if (ended > absl::ZeroDuration()) *job.mutable_end_time() = job.create_time();
      RETURN_IF_ERROR(t.CreateJob(&job));
      v1::Attempt attempt;
      attempt.set_number(1);
      RETURN_IF_ERROR(t.PutAttempt(id, attempt));
      v1::StepReport step;
      step.set_step(1);
      RETURN_IF_ERROR(t.PutStep(id, step));
      v1::EvalReport eval;
      eval.set_step(1);
      RETURN_IF_ERROR(t.PutEval(id, eval));
      return t.AppendLogs(id, 1, {v1::LogLine()});
    });
  }
  // Attempts, steps, evaluations and lines of a job; "-" for none of that name.
  std::string Record(const std::string& id) {
    std::string record = "-";
    const absl::Status read = store_->Read([&](ReadTransaction& t) -> absl::Status {
      const absl::StatusOr<v1::Job> job = t.GetJob(id);
      if (absl::IsNotFound(job.status())) return absl::OkStatus();
      RETURN_IF_ERROR(job.status());
      ASSIGN_OR_RETURN(const StepPage steps, t.ListSteps(id, 0, 0, 100));
      ASSIGN_OR_RETURN(const EvalPage evals, t.ListEvals(id, 0, 100));
      ASSIGN_OR_RETURN(const LogPage logs, t.ReadLogs({.job = id}));
      record = absl::StrCat(job->attempts_size(), " ", steps.steps.size(), " ", evals.evals.size(),
                            " ", logs.lines.size());
      return absl::OkStatus();
    });
    EXPECT_TRUE(read.ok()) << read;
    return record;
  }
  // A call that is noted now.
  void AddCall(const std::string& caller) {
    Write([&](WriteTransaction& t) {
      v1::AuditRecord record;
      record.set_caller(caller);
      return t.AppendAudit(record);
    });
  }
  // Who made the calls that are noted, the newest first.
  std::vector<std::string> Callers() {
    std::vector<std::string> callers;
    const absl::Status read = store_->Read([&](ReadTransaction& t) -> absl::Status {
      ASSIGN_OR_RETURN(const AuditPage page, t.ListAudit({.limit = 10}));
      for (const v1::AuditRecord& record : page.records) callers.push_back(record.caller());
      return absl::OkStatus();
    });
    EXPECT_TRUE(read.ok()) << read;
    return callers;
  }

  const TempDir dir_;
  FakeClock clock_;
  std::unique_ptr<Store> store_;
};

// A store in which something happens between the first page of a list and what is done with it.
class BusyStore : public testing::ForwardingStore {
 public:
  BusyStore(Store* store, std::function<void()> meanwhile)
      : ForwardingStore(store), meanwhile_(std::move(meanwhile)) {}
  absl::Status Read(absl::FunctionRef<absl::Status(ReadTransaction&)> body) override {
    const absl::Status status = ForwardingStore::Read(body);
    if (meanwhile_ != nullptr) std::exchange(meanwhile_, nullptr)();
    return status;
  }

 private:
  std::function<void()> meanwhile_;
};

// Counts how often what is old was looked for.
class CountingStore : public testing::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Read(absl::FunctionRef<absl::Status(ReadTransaction&)> body) override {
    const absl::Status status = ForwardingStore::Read(body);
    absl::MutexLock lock(&mutex_);
    ++reads_;
    return status;
  }
  // Until so many more looks have ended.
  void AwaitLooks(int looks) {
    constexpr int kReadsOfALook = 3;  // one for each state in which a job has ended
    absl::MutexLock lock(&mutex_);
    // The one that is under way may have begun before.
    const int enough = reads_ + (looks + 1) * kReadsOfALook;
    const auto there = [&] { return reads_ >= enough; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Minutes(1)));
  }

 private:
  absl::Mutex mutex_;
  int reads_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST_F(RetentionTest, ReportsGoFirstThenTheJob) {
  for (int i = 0; i < 250; ++i) AddJob(absl::StrCat("old-", i), v1::Job::FAILED, kDay * 40);
  AddJob("old-success", v1::Job::SUCCEEDED, kDay * 40);
  AddJob("old-cancelled", v1::Job::CANCELLED, kDay * 40);
  AddJob("ancient", v1::Job::SUCCEEDED, kDay * 400);
  AddJob("new", v1::Job::CANCELLED, kDay * 5);
  AddJob("runs", v1::Job::RUNNING, absl::ZeroDuration());
  const RetentionOptions options = {.events = kDay * 30, .jobs = kDay * 365};
  EXPECT_EQ(DeleteOld(*store_, clock_.Now(), options)->jobs, 253);
  EXPECT_EQ(Record("ancient"), "-");
  EXPECT_EQ(Record("old-0"), "1 0 0 0");
  EXPECT_EQ(Record("old-249"), "1 0 0 0");
  EXPECT_EQ(Record("old-success"), "1 0 0 0");
  EXPECT_EQ(Record("old-cancelled"), "1 0 0 0");
  EXPECT_EQ(Record("new"), "1 1 1 1");
  EXPECT_EQ(Record("runs"), "1 1 1 1");
  EXPECT_EQ(DeleteOld(*store_, clock_.Now(), options)->jobs, 0);
  EXPECT_EQ(DeleteOld(*store_, clock_.Now() + kDay * 400, options)->jobs, 253);
  EXPECT_EQ(Record("old-0"), "-");
  EXPECT_EQ(Record("runs"), "1 1 1 1");
}

TEST_F(RetentionTest, WhatHasReachedItsAgeStaysAndWhatIsOlderGoes) {
  constexpr absl::Duration kMoment = absl::Microseconds(1);
  const RetentionOptions options = {.events = kDay * 30, .jobs = kDay * 365, .audit = kDay * 20};
  const absl::Time now = clock_.Now();
  AddJob("reports-of-age", v1::Job::SUCCEEDED, options.events);
  AddJob("reports-too-old", v1::Job::SUCCEEDED, options.events + kMoment);
  AddJob("of-age", v1::Job::SUCCEEDED, options.jobs);
  AddJob("too-old", v1::Job::SUCCEEDED, options.jobs + kMoment);
  clock_.Advance(-options.audit - kMoment);
  AddCall("too-old");
  clock_.Advance(kMoment);
  AddCall("of-age");
  EXPECT_EQ(DeleteOld(*store_, now, options)->jobs, 3);
  EXPECT_EQ(Record("reports-of-age"), "1 1 1 1");
  EXPECT_EQ(Record("reports-too-old"), "1 0 0 0");
  EXPECT_EQ(Record("of-age"), "1 0 0 0");
  EXPECT_EQ(Record("too-old"), "-");
  EXPECT_THAT(Callers(), ElementsAre("of-age"));
}

// What goes makes room, and what is written for that is little.
TEST_F(RetentionTest, WhatIsOldGoesWhileTheDiskIsFull) {
  class FullStore : public testing::ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    absl::Status Write(absl::FunctionRef<absl::Status(WriteTransaction&)> body,
                       Need need) override {
      if (need == Need::kOrdinary) return absl::ResourceExhaustedError("the disk is full");
      return ForwardingStore::Write(body, need);
    }
  };
  AddJob("old", v1::Job::FAILED, kDay * 40);
  AddCall("old");
  const FakeClock steady(clock_.Now());
  clock_.Advance(kDay * 100);
  FullStore full(store_.get());
  HistoryTime time(&full, &clock_, &steady);
  EXPECT_EQ(time.Begin(), absl::OkStatus());
  EXPECT_EQ(time.Advance().status(), absl::OkStatus());
  const absl::StatusOr<Deleted> deleted = DeleteOld(full, clock_.Now(), {});
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->jobs, 1);
  EXPECT_EQ(Record("old"), "1 0 0 0");
  EXPECT_THAT(Callers(), ElementsAre());
}

TEST_F(RetentionTest, WhateverTheStoreRefusesIsSaid) {
  // Refuses one call, after so many.
  class RefusingStore : public testing::ForwardingStore {
   public:
    RefusingStore(Store* store, int calls) : ForwardingStore(store), calls_(calls) {}
    absl::Status Read(absl::FunctionRef<absl::Status(ReadTransaction&)> body) override {
      return calls_-- == 0 ? absl::UnavailableError("not now") : ForwardingStore::Read(body);
    }
    absl::Status Write(absl::FunctionRef<absl::Status(WriteTransaction&)> body,
                       Need need) override {
      return calls_-- == 0 ? absl::UnavailableError("not now") : ForwardingStore::Write(body, need);
    }

   private:
    int calls_;
  };
  AddJob("a", v1::Job::SUCCEEDED, kDay * 400);
  // The audit log, the lists of three states, and the job after that of its own.
  for (int calls = 0; calls < 5; ++calls) {
    RefusingStore store(store_.get(), calls);
    EXPECT_EQ(DeleteOld(store, clock_.Now(), {}).status(), absl::UnavailableError("not now"))
        << calls;
  }
  EXPECT_EQ(Record("a"), "-");
}

TEST_F(RetentionTest, FlagsCountDaysAndNoReportOutlivesItsJob) {
  RetentionOptions options;
  EXPECT_EQ(options.events, kDay * 90);
  EXPECT_EQ(options.jobs, kDay * 365);
  EXPECT_EQ(options.audit, kDay * 90);
  EXPECT_EQ(options.interval, absl::Hours(1));
  CLI::App app;
  AddRetentionFlags(app, &options);
  app.parse("--keep-events 10 --keep-jobs 36500 --audit-days 1 --retention-interval 0.5");
  EXPECT_EQ(options.events, kDay * 10);
  EXPECT_EQ(options.jobs, kDay * 36500);
  EXPECT_EQ(options.audit, kDay);
  EXPECT_EQ(options.interval, absl::Milliseconds(500));
  for (const char* wrong :
       {"--keep-events 0", "--keep-jobs 36501", "--audit-days 0", "--retention-interval 0",
        "--retention-interval 1e-300", "--retention-interval nan"}) {
    EXPECT_THROW(app.parse(wrong), CLI::ValidationError) << wrong;
  }
  options.jobs = options.events;
  EXPECT_EQ(Validate(options), absl::OkStatus());
  options.jobs -= kDay;
  EXPECT_EQ(Validate(options).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(RetentionTest, AJobThatRunsAgainByNowKeepsEverything) {
  AddJob("a", v1::Job::CANCELLED, kDay * 400);
  AddJob("b", v1::Job::CANCELLED, kDay * 400);
  // The list of jobs that were cancelled is the first.
  BusyStore busy(store_.get(), [&] {
    Write([](WriteTransaction& t) { return t.DeleteJob("a"); });
    AddJob("a", v1::Job::RUNNING, absl::ZeroDuration());
    Write([](WriteTransaction& t) { return t.DeleteJob("b"); });
    AddJob("b", v1::Job::FAILED, kDay);  // it ran again, and ended
  });
  EXPECT_EQ(DeleteOld(busy, clock_.Now(), {.events = kDay * 30, .jobs = kDay * 365})->jobs, 0);
  EXPECT_EQ(Record("a"), "1 1 1 1");
  EXPECT_EQ(Record("b"), "1 1 1 1");
}

TEST_F(RetentionTest, AJobThatIsGoneByNowHoldsNothingUp) {
  AddJob("a", v1::Job::CANCELLED, kDay * 400);
  AddJob("b", v1::Job::SUCCEEDED, kDay * 400);
  BusyStore busy(store_.get(),
                 [&] { Write([](WriteTransaction& t) { return t.DeleteJob("a"); }); });
  const absl::StatusOr<Deleted> deleted =
      DeleteOld(busy, clock_.Now(), {.events = kDay * 30, .jobs = kDay * 365});
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->jobs, 1);
  EXPECT_EQ(Record("b"), "-");
}

// Before, one such record kept all others for ever.
TEST_F(RetentionTest, ADamagedRecordIsPassedOverByName) {
  const RetentionOptions options = {.events = kDay * 30, .jobs = kDay * 365};
  for (const char* id : {"a", "b", "c"}) AddJob(id, v1::Job::SUCCEEDED, kDay * 400);
  AddJob("d", v1::Job::FAILED, kDay * 40);
  testing::DamageRecord(dir_.File("db"), "jobs", "id = 'b'");
  testing::DamageRecord(dir_.File("db"), "attempts", "job = 'c'");
  for (const int jobs : {3, 0}) {
    const absl::StatusOr<Deleted> deleted = DeleteOld(*store_, clock_.Now(), options);
    ASSERT_TRUE(deleted.ok()) << deleted.status();
    EXPECT_EQ(deleted->jobs, jobs);
    EXPECT_THAT(deleted->damage, ElementsAre(HasSubstr("the record of jobs/b is damaged")));
  }
  EXPECT_EQ(Record("a"), "-");
  EXPECT_EQ(Record("c"), "-") << "how old it is can be told without its attempts";
  EXPECT_EQ(Record("d"), "1 0 0 0");
}

// A damaged job is told of once, however often what is old is looked for.
TEST_F(RetentionTest, DamageIsLoggedOnce) {
  AddJob("a", v1::Job::SUCCEEDED, absl::Hours(24));
  testing::DamageRecord(dir_.File("db"), "jobs");
  const auto log = std::make_shared<spdlog::sinks::ringbuffer_sink_mt>(100);
  spdlog::default_logger()->sinks().push_back(log);
  const absl::Cleanup remove = [] { spdlog::default_logger()->sinks().pop_back(); };
  CountingStore store(store_.get());
  {
    const Retention retention(&store, &clock_, &clock_, {.interval = absl::Milliseconds(1)});
    store.AwaitLooks(3);
  }
  const std::vector<std::string> lines = log->last_formatted();
  EXPECT_EQ(std::ranges::count_if(lines,
                                  [](const std::string& line) {
                                    return absl::StrContains(line, "jobs/a is damaged");
                                  }),
            1);
}

TEST_F(RetentionTest, RecordsOfTheAuditLogGoWhenTheyAreOld) {
  for (const char* caller : {"old", "new"}) {
    clock_.Advance(absl::Hours(48));
    AddCall(caller);
  }
  ASSERT_TRUE(DeleteOld(*store_, clock_.Now(), {.audit = absl::Hours(47)}).ok());
  EXPECT_THAT(Callers(), ElementsAre("new"));
}

// Before, a clock that was ahead when the coordinator started deleted the whole history.
TEST_F(RetentionTest, NothingGoesByAClockThatIsAhead) {
  AddJob("a", v1::Job::SUCCEEDED, absl::Hours(24));
  const FakeClock ahead(clock_.Now() + absl::Hours(24 * 3650));
  { const Retention retention(store_.get(), &ahead, &clock_, {}); }
  EXPECT_EQ(Record("a"), "1 1 1 1") << "not at the start";
  const absl::Status read = store_->Read([&](ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(const absl::Time begun, t.GetHistoryTime());
    EXPECT_EQ(begun, clock_.Now() - kDay) << "whatever is recorded from now on";
    return absl::OkStatus();
  });
  EXPECT_TRUE(read.ok()) << read;
  class MovingClock : public Clock {
   public:
    absl::Time Now() const override { return absl::UnixEpoch() + absl::Hours(24 * days.load()); }
    std::atomic<int> days = 0;
  };
  MovingClock steady;
  CountingStore store(store_.get());
  const Retention retention(&store, &ahead, &steady, {.interval = absl::Milliseconds(1)});
  store.AwaitLooks(2);
  EXPECT_EQ(Record("a"), "1 1 1 1") << "nothing has passed";
  steady.days = 400;
  store.AwaitLooks(2);
  EXPECT_EQ(Record("a"), "-") << "more than a year has passed";
}

// A cluster may have so many ranks, ring steps and layers: the record of a step stays small, and
// that of many steps does not hold every layer of each.
TEST_F(RetentionTest, ARecordGrowsWithWhatUsersRead) {
  AddJob("j", v1::Job::RUNNING, absl::ZeroDuration());
  constexpr uint64_t kSteps = 2048;
  constexpr int kLayers = 64, kRanks = 4096;
  v1::StepReport report;
  for (int rank = 0; rank < kRanks; ++rank) report.add_rank_tiles(1'000'000);
  report.set_worker_imbalance(1.01);
  for (int layer = 0; layer < kLayers; ++layer) {
    v1::LayerReport* const added = report.add_layers();
    added->set_layer(static_cast<uint32_t>(layer));
    added->set_density(0.05);
    added->set_recall(0.97);
    for (int step = 0; step < 64; ++step) added->add_tiles_per_ring_step(1'000'000);
  }
  report.mutable_layers(0)->add_tiles_per_ring_step(1);  // one more than is kept
  for (uint64_t step = 1; step <= kSteps; step += 64) {
    Write([&](WriteTransaction& t) -> absl::Status {
      for (uint64_t i = step; i < step + 64; ++i) {
        report.set_step(i);
        report.set_loss(static_cast<double>(i));
        RETURN_IF_ERROR(t.PutStep("j", report));
      }
      return absl::OkStatus();
    });
  }
  uint64_t seen = 0, with_layers = 0;
  size_t bytes = 0;
  StepPage page;
  do {
    const absl::Status read = store_->Read([&](ReadTransaction& t) -> absl::Status {
      ASSIGN_OR_RETURN(page, t.ListSteps("j", 0, page.last_sequence, 200));
      return absl::OkStatus();
    });
    ASSERT_TRUE(read.ok()) << read;
    for (const v1::StepReport& step : page.steps) {
      EXPECT_EQ(step.step(), ++seen);
      EXPECT_EQ(step.loss(), static_cast<double>(seen));
      EXPECT_EQ(step.worker_imbalance(), 1.01);
      if (step.layers_size() > 0) {
        EXPECT_THAT(step.layers(1).tiles_per_ring_step(), ::testing::ElementsAre(64'000'000));
      }
      EXPECT_LE(step.ByteSizeLong(), 4096u);
      bytes += step.ByteSizeLong();
      if (step.layers_size() == kLayers) ++with_layers;
    }
  } while (page.more);
  EXPECT_EQ(seen, kSteps);
  EXPECT_EQ(with_layers, 1024 + 1024 / 16);  // the newest, and every 16th
  EXPECT_LT(bytes, size_t{4} << 20);
}

}  // namespace
}  // namespace ringleader::store
