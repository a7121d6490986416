// Failed and refused calls in the audit log.
#include "coordinator/access/audit_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/testing/fake_clock.h"
#include "base/testing/temp_dir.h"
#include "coordinator/access/caller.h"
#include "coordinator/store/sqlite/sqlite_store.h"
#include "coordinator/store/testing/forwarding_store.h"

namespace ringleader::access {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Property;

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
                      ASSIGN_OR_RETURN(
                          page, t.ListAudit({.limit = 100'000, .max_bytes = size_t{64} << 20}));
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
    log.Note(Record("carol"), absl::NotFoundError("no '/home/josé' \"here\""));
    log.Note(Record("dave"), absl::NotFoundError(std::string(499, 'a') + "中\xff"));
    log.Note(Record("eve"), absl::NotFoundError("no \xff such job"));
  }
  auto records = Records();
  ASSERT_EQ(records.size(), 5u);
  EXPECT_EQ(records[0].message(), "no \\xff such job") << "no UTF-8, which no record may hold";
  EXPECT_EQ(records[1].message(), std::string(499, 'a'));
  EXPECT_EQ(records[2].message(), "no '/home/josé' \"here\"");
  records.erase(records.begin(), records.begin() + 3);
  EXPECT_EQ(records[1].caller(), "alice");
  EXPECT_EQ(records[1].outcome(), "NOT_FOUND");
  EXPECT_EQ(records[1].message(), "no \\x1b[2J such job");
  EXPECT_EQ(records[1].time().seconds(), absl::ToUnixSeconds(clock_.Now()));
  EXPECT_EQ(records[0].message().size(), 500u);
}

TEST(RecordOfTest, AddressesReadAsPeopleWriteThem) {
  for (const auto& [peer, address] : {std::pair{"ipv6:%5B::1%5D:58142", "[::1]:58142"},
                                      {"ipv6:%5Bfe80::1%25eth0%5D:7", "[fe80::1%eth0]:7"},
                                      {"ipv4:10.0.0.1:58142", "10.0.0.1:58142"},
                                      {"unix:/run/ringleader", "unix:/run/ringleader"}}) {
    EXPECT_EQ(RecordOf(LocalCaller(), peer).address(), address);
  }
}

TEST_F(AuditLogTest, WhatTurnsTheOrderOfTextIsEscaped) {
  EXPECT_EQ(RecordText("jobs/\u202egnp\x07"), "jobs/\\u202egnp\\x07");
  EXPECT_EQ(RecordText(std::string(199, 'a') + "é"), std::string(199, 'a')) << "no half character";
}

// A disk that stays full: the log waits for space, and not for ever where it ends.
TEST_F(AuditLogTest, EndsWhileThereIsNoSpace) {
  class FullStore : public store::testing::ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    absl::Status Space() override { return absl::ResourceExhaustedError("full"); }
  };
  FullStore full(store_.get());
  {
    AuditLog log(&full, &clock_);
    log.Note(Record("alice"), absl::NotFoundError("no such job"));
    EXPECT_TRUE(Records().empty());
  }
  EXPECT_EQ(Records().size(), 1u);
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
  EXPECT_THAT(records, Contains(AllOf(Property(&v1::AuditRecord::outcome, "RESOURCE_EXHAUSTED"),
                                      Property(&v1::AuditRecord::message,
                                               HasSubstr("more calls failed or were refused")))));
  EXPECT_THAT(records, Contains(Property(&v1::AuditRecord::caller, "node-7")));
}

// Only so many callers' allowances are kept: those go that are full again, and nobody gets a new
// one by it.
TEST_F(AuditLogTest, AmongTenThousandCallersOneThatUsedItsAllowanceUpGetsNoOther) {
  AuditLog log(store_.get(), &clock_);
  const auto note = [&](const std::string& caller) {
    log.Note(Record(caller), absl::PermissionDeniedError("no"));
  };
  const auto noted = [&](const std::string& caller) {
    const auto records = Records();
    return std::count_if(records.begin(), records.end(),
                         [&](const auto& record) { return record.caller() == caller; });
  };
  // Until what was noted before is written, so that there is room for more.
  int markers = 0;
  const auto settle = [&] {
    const std::string marker = absl::StrCat("marker-", markers++);
    do {
      note(marker);
      absl::SleepFor(absl::Milliseconds(5));
    } while (noted(marker) == 0);
  };
  constexpr int kOthers = 9'990;
  for (int i = 0; i < kOthers; ++i) note(absl::StrCat("other-", i));
  settle();
  clock_.Advance(absl::Seconds(9'999));
  for (int i = 0; i < 1'500; ++i) note("mallory");
  settle();
  ASSERT_EQ(noted("mallory"), 1'000);
  EXPECT_GT(log.allowances(), kOthers);
  // Now the others' are full again, and go where one caller more makes too many.
  clock_.Advance(absl::Seconds(1));
  for (int i = 0; i < 20; ++i) note(absl::StrCat("new-", i));
  EXPECT_LT(log.allowances(), 50);
  for (int i = 0; i < 1'000; ++i) note("mallory");
  settle();
  EXPECT_EQ(noted("mallory"), 1'000);
  EXPECT_EQ(noted("new-19"), 1);
  // What it earns by waiting it has all the same.
  clock_.Advance(absl::Seconds(104));
  for (int i = 0; i < 1'000; ++i) note("mallory");
  settle();
  EXPECT_EQ(noted("mallory"), 1'010);
}

}  // namespace
}  // namespace ringleader::access
