// Flags of the coordinator that govern what happens by itself, later: its process does as they say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "coordinator/store/sqlite/sqlite_store.h"
#include "proto/timestamps.h"
#include "tests/support/coordinator_process.h"

namespace ringleader::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Of one coordinator, e.g., for its API and its metrics.
TEST(FreePortTest, IsAnotherOneAtEveryCall) {
  std::set<int> ports;
  for (int i = 0; i < 2000; ++i) ports.insert(FreePort());
  EXPECT_EQ(ports.size(), 2000u);
}

constexpr absl::Duration kDay = absl::Hours(24);

// A job that ended, with a line of log, and a call that was noted, so many days ago.
absl::Status AddOld(store::WriteTransaction& t, int days) {
  const absl::Time then = absl::Now() - days * kDay;
  const std::string id = absl::StrCat("ended-", days);
  v1::Job job;
  job.set_name("jobs/" + id);
  job.mutable_spec()->set_name(id);
  job.set_state(v1::Job::SUCCEEDED);
  SetTime(then, job.mutable_create_time());
  SetTime(then, job.mutable_end_time());
  RETURN_IF_ERROR(t.CreateJob(&job));
  RETURN_IF_ERROR(t.AppendLogs(id, 1, {v1::LogLine()}));
  v1::AuditRecord record;
  record.set_caller(id);
  SetTime(then, record.mutable_time());
  return t.AppendAudit(record);
}

TEST(CoordinatorFlagsTest, WhatIsOldGoesAfterAsManyDaysAsFlagsSay) {
  CoordinatorProcess coordinator({"--reserve-mebibytes", "1", "--keep-events", "10", "--keep-jobs",
                                  "30", "--audit-days", "20", "--retention-interval", "0.05"});
  const auto open = [&] {
    auto store = store::OpenSqliteStore({.path = coordinator.data_dir() + "/ringleader.db"});
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  };
  std::filesystem::create_directories(coordinator.data_dir());
  ASSERT_EQ(open()->Write([](store::WriteTransaction& t) -> absl::Status {
    for (const int days : {40, 25, 15, 5}) RETURN_IF_ERROR(AddOld(t, days));
    return t.SetHistoryTime(absl::Now());
  }),
            absl::OkStatus());
  ASSERT_TRUE(coordinator.Start()) << coordinator.log();
  const auto stub = v1::JobService::NewStub(coordinator.Channel());
  // The oldest goes last.
  EXPECT_TRUE(Eventually([&] {
    v1::GetJobRequest request;
    request.set_name("jobs/ended-40");
    v1::Job job;
    return stub->GetJob(CoordinatorProcess::Context().get(), request, &job).error_code() ==
           grpc::StatusCode::NOT_FOUND;
  }));
  coordinator.process().Signal(SIGTERM);
  EXPECT_EQ(coordinator.process().Wait(), 0) << coordinator.log();
  std::vector<std::string> jobs, with_logs, callers;
  const absl::Status read = open()->Read([&](store::ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(const store::JobPage page, t.ListJobs({}));
    for (const v1::Job& job : page.jobs) {
      jobs.push_back(job.spec().name());
      ASSIGN_OR_RETURN(const store::LogPage logs, t.ReadLogs({.job = jobs.back()}));
      if (!logs.lines.empty()) with_logs.push_back(jobs.back());
    }
    ASSIGN_OR_RETURN(const store::AuditPage audit, t.ListAudit({}));
    for (const v1::AuditRecord& record : audit.records) callers.push_back(record.caller());
    return absl::OkStatus();
  });
  EXPECT_EQ(read, absl::OkStatus());
  EXPECT_THAT(jobs, ElementsAre("ended-5", "ended-15", "ended-25"));
  EXPECT_THAT(with_logs, ElementsAre("ended-5"));
  EXPECT_THAT(callers, ElementsAre("ended-5", "ended-15"));
}

// CLI11's ranges let NaN pass, and print all digits of their limits.
TEST(CoordinatorFlagsTest, NumbersOfSecondsAreFinite) {
  for (const char* flag : {"--plan-seconds", "--measure-seconds", "--plan-mebibytes", "--heartbeat",
                           "--retention-interval", "--trace-step-seconds"}) {
    for (const char* value : {"nan", "inf"}) {
      CoordinatorProcess coordinator({flag, value});
      coordinator.Spawn();
      EXPECT_EQ(coordinator.process().Wait(), 64);
      EXPECT_THAT(coordinator.log(),
                  HasSubstr(absl::StrCat(flag, ": '", value, "' is not allowed; give a finite")));
    }
  }
}

TEST(CoordinatorFlagsTest, MetricsAreForWhoeverReachesThemOnlyIfAFlagSaysSo) {
  const TempDir dir;
  const auto start = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--data-dir", dir.File("data"), "--listen", "127.0.0.1:0",
                             "--metrics-listen", "0.0.0.0:0"});
    return std::make_unique<Process>(ProgramPath("ringleader-coordinator"), more,
                                     dir.File(absl::StrCat(more.front(), ".log")));
  };
  const auto closed = start({"--check-files=false"});
  EXPECT_EQ(closed->Wait(), 1);
  EXPECT_THAT(closed->Log(), HasSubstr("give --metrics-public if whoever can reach it"));
  const auto open = start({"--metrics-public"});
  EXPECT_TRUE(Eventually([&] {
    return open->Log().find("metrics are at http://0.0.0.0:") != std::string::npos;
  })) << open->Log();
}

}  // namespace
}  // namespace ringleader::testing
