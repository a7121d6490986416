// Failed and refused calls in the audit log.
#include "coordinator/access/audit_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status_macros.h"
#include "base/testing/fake_clock.h"
#include "base/testing/temp_dir.h"
#include "coordinator/store/sqlite/sqlite_store.h"

namespace ringleader::access {
namespace {

using ::testing::HasSubstr;

class AuditLogTest : public ::testing::Test {
 protected:
  AuditLogTest() {
    auto store = store::OpenSqliteStore({.path = dir_.File("coordinator.db"), .clock = &clock_});
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  std::vector<v1::AuditRecord> Records() {
    store::AuditPage page;
    EXPECT_TRUE(store_
                    ->Read([&](store::ReadTransaction& t) -> absl::Status {
                      ASSIGN_OR_RETURN(page, t.ListAudit({.limit = 10000}));
                      return absl::OkStatus();
                    })
                    .ok());
    return page.records;
  }
  static v1::AuditRecord Record(const std::string& caller) {
    v1::AuditRecord record;
    record.set_caller(caller);
    return record;
  }

  TempDir dir_;
  FakeClock clock_;
  std::unique_ptr<store::Store> store_;
};

TEST_F(AuditLogTest, WhatIsNotedIsStoredWithItsReason) {
  {
    AuditLog log(store_.get(), &clock_);
    log.Note(Record("alice"), absl::NotFoundError("no \x1b[2J such job"));
    log.Note(Record("bob"), absl::InternalError(std::string(5000, 'x')));
  }
  const auto records = Records();
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[1].caller(), "alice");
  EXPECT_EQ(records[1].outcome(), "NOT_FOUND");
  EXPECT_EQ(records[1].message(), "no \\x1b[2J such job");
  EXPECT_EQ(records[1].time().seconds(), absl::ToUnixSeconds(clock_.Now()));
  EXPECT_EQ(records[0].message().size(), 500u);
}

TEST_F(AuditLogTest, AFloodOfRefusedCallsIsCountedInsteadOfNoted) {
  {
    AuditLog log(store_.get(), &clock_);
    for (int i = 0; i < 50'000; ++i) {
      log.Note(Record("mallory"), absl::UnauthenticatedError("no"));
    }
    // A flood hides nobody else's calls.
    log.Note(Record("node-7"), absl::PermissionDeniedError("forged"));
  }
  const auto records = Records();
  EXPECT_LT(records.size(), 1100u);
  EXPECT_GE(records.size(), 1001u);
  EXPECT_EQ(records[0].outcome(), "RESOURCE_EXHAUSTED");
  EXPECT_THAT(records[0].message(), HasSubstr("more calls failed or were refused"));
  EXPECT_THAT(records,
              ::testing::Contains(::testing::Property(&v1::AuditRecord::caller, "node-7")));
}

}  // namespace
}  // namespace ringleader::access
