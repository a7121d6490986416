// Owners of jobs, tokens and the audit log in the store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/fake_clock.h"
#include "base/testing/temp_dir.h"
#include "coordinator/store/sqlite/sqlite_store.h"

namespace ringleader::store {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class SqliteAccessTest : public ::testing::Test {
 protected:
  SqliteAccessTest() {
    auto store = OpenSqliteStore({.path = dir_.File("coordinator.db"), .clock = &clock_});
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }

  static StoredToken Token(const std::string& id, absl::Time expires) {
    StoredToken token;
    token.token.set_name("tokens/" + id);
    token.token.mutable_expire_time()->set_seconds(absl::ToUnixSeconds(expires));
    token.sha256 = id + std::string(32 - id.size(), '.');
    return token;
  }
  absl::Status Create(const StoredToken& token) {
    return store_->Write([&](WriteTransaction& t) { return t.CreateToken(token); });
  }
  // By the time of history; true if `id` is there when the next token has come.
  bool IsKept(const std::string& id, absl::Time history) {
    EXPECT_TRUE(store_->Write([&](WriteTransaction& t) { return t.SetHistoryTime(history); }).ok());
    const std::string next = absl::StrCat("next-", ++next_tokens_);
    EXPECT_TRUE(Create(Token(next, clock_.Now() + absl::Hours(1))).ok());
    const std::vector<std::string> names = TokenNames();
    return std::ranges::find(names, "tokens/" + id) != names.end();
  }
  std::vector<std::string> TokenNames() {
    std::vector<std::string> names;
    EXPECT_TRUE(store_
                    ->Read([&](ReadTransaction& t) -> absl::Status {
                      ASSIGN_OR_RETURN(const auto tokens, t.ListTokens());
                      for (const StoredToken& token : tokens) names.push_back(token.token.name());
                      return absl::OkStatus();
                    })
                    .ok());
    return names;
  }
  void Note(const std::string& caller, const std::string& method, const std::string& resource,
            const std::string& outcome, size_t message_bytes = 0) {
    v1::AuditRecord record;
    record.set_caller(caller);
    record.set_method(method);
    record.set_resource(resource);
    record.set_outcome(outcome);
    record.set_message(std::string(message_bytes, 'x'));
    EXPECT_TRUE(store_->Write([&](WriteTransaction& t) { return t.AppendAudit(record); }).ok());
  }
  AuditPage Audit(const AuditQuery& query) {
    AuditPage page;
    EXPECT_TRUE(store_
                    ->Read([&](ReadTransaction& t) -> absl::Status {
                      ASSIGN_OR_RETURN(page, t.ListAudit(query));
                      return absl::OkStatus();
                    })
                    .ok());
    return page;
  }
  std::vector<uint64_t> Sequences(const AuditQuery& query) {
    std::vector<uint64_t> sequences;
    for (const auto& record : Audit(query).records) sequences.push_back(record.sequence());
    return sequences;
  }

  TempDir dir_;
  FakeClock clock_;
  std::unique_ptr<Store> store_;
  int next_tokens_ = 0;
};

TEST_F(SqliteAccessTest, JobsAreFoundByOwnerAndProject) {
  for (const char* owner : {"alice", "bob"}) {
    v1::Job job;
    job.set_name(absl::StrCat("jobs/of-", owner));
    job.mutable_spec()->set_name(absl::StrCat("of-", owner));
    job.set_owner(owner);
    job.set_project("ocean");
    EXPECT_TRUE(store_->Write([&](WriteTransaction& t) { return t.CreateJob(&job); }).ok());
  }
  const auto count = [&](std::vector<JobTerm> terms) {
    int64_t total = -1;
    EXPECT_TRUE(store_
                    ->Read([&](ReadTransaction& t) -> absl::Status {
                      ASSIGN_OR_RETURN(const JobPage page, t.ListJobs({.terms = terms}));
                      total = page.total;
                      return absl::OkStatus();
                    })
                    .ok());
    return total;
  };
  const JobTerm alice = {.field = JobTerm::Field::kOwner, .value = "alice"};
  const JobTerm ocean = {.field = JobTerm::Field::kProject, .value = "ocean"};
  const JobTerm not_ocean = {
      .field = JobTerm::Field::kProject, .op = JobTerm::Operator::kNotEquals, .value = "ocean"};
  EXPECT_EQ(count({alice}), 1);
  EXPECT_EQ(count({ocean}), 2);
  EXPECT_EQ(count({alice, ocean}), 1);
  EXPECT_EQ(count({not_ocean}), 0);
}

TEST_F(SqliteAccessTest, TokensAreKeptUntilTheyAreDeleted) {
  const absl::Time now = clock_.Now();
  ASSERT_TRUE(Create(Token("b", now + absl::Hours(1))).ok());
  ASSERT_TRUE(Create(Token("a", now + absl::Hours(3))).ok());
  EXPECT_EQ(Create(Token("a", now)).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(TokenNames(), ElementsAre("tokens/a", "tokens/b"));
  clock_.Advance(absl::Hours(2));
  ASSERT_TRUE(Create(Token("c", now + absl::Hours(3))).ok());
  EXPECT_THAT(TokenNames(), ElementsAre("tokens/a", "tokens/b", "tokens/c"));
  v1::Token removed;
  const auto remove = [&](WriteTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(removed, t.DeleteToken("tokens/a"));
    return absl::OkStatus();
  };
  EXPECT_TRUE(store_->Write(remove).ok());
  EXPECT_EQ(removed.expire_time().seconds(), absl::ToUnixSeconds(now + absl::Hours(3)));
  EXPECT_EQ(store_->Write(remove).code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(TokenNames(), ElementsAre("tokens/b", "tokens/c"));
}

TEST_F(SqliteAccessTest, TokensGoLongAfterTheyHaveExpired) {
  const absl::Time expires = clock_.Now() + absl::Hours(1);
  const absl::Time gone = expires + kExpiredTokenLifetime;
  EXPECT_EQ(kExpiredTokenLifetime, absl::Hours(24 * 7));
  ASSERT_TRUE(Create(Token("a", expires)).ok());
  clock_.Advance(absl::Hours(24 * 30));
  EXPECT_TRUE(IsKept("a", gone));
  EXPECT_FALSE(IsKept("a", gone + absl::Seconds(1)));
}

TEST_F(SqliteAccessTest, AClockThatIsAheadDeletesNoTokens) {
  const absl::Time begun = clock_.Now();
  ASSERT_TRUE(Create(Token("a", begun + absl::Hours(1))).ok());
  clock_.Advance(absl::Hours(24 * 3650));
  ASSERT_TRUE(Create(Token("b", begun + absl::Hours(2))).ok());
  EXPECT_THAT(TokenNames(), ElementsAre("tokens/a", "tokens/b")) << "no history yet";
  EXPECT_TRUE(IsKept("a", begun + kExpiredTokenLifetime)) << "history leaps nowhere";
  // Nor does one that is right again and finds history ahead.
  clock_.Advance(-absl::Hours(24 * 3650));
  EXPECT_TRUE(IsKept("a", begun + absl::Hours(24 * 3650)));
}

TEST_F(SqliteAccessTest, AuditRecordsAreFoundByWhatTheySay) {
  Note("alice", "JobService.CreateJob", "jobs/a", "OK");
  clock_.Advance(absl::Hours(1));
  const absl::Time second = clock_.Now();
  Note("bob", "JobService.DeleteJob", "jobs/a", "PERMISSION_DENIED");
  Note("bob", "NodeService.DrainNode", "nodes/n", "OK");
  EXPECT_THAT(Sequences({}), ElementsAre(3, 2, 1));
  EXPECT_THAT(Sequences({.caller = "bob"}), ElementsAre(3, 2));
  EXPECT_THAT(Sequences({.method = "DeleteJob"}), ElementsAre(2));
  EXPECT_THAT(Sequences({.method = "JobService.DeleteJob"}), ElementsAre(2));
  EXPECT_THAT(Sequences({.method = "Delete"}), IsEmpty());
  EXPECT_THAT(Sequences({.resource = "jobs/a", .outcome = "OK"}), ElementsAre(1));
  EXPECT_THAT(Sequences({.after = second}), ElementsAre(3, 2));
  EXPECT_THAT(Sequences({.before = second}), ElementsAre(1));
  EXPECT_EQ(Audit({}).records[0].time().seconds(), absl::ToUnixSeconds(second));
}

TEST_F(SqliteAccessTest, AnAuditRecordHasTheTimeOfWhatItTellsOf) {
  v1::AuditRecord record;
  record.mutable_time()->set_seconds(absl::ToUnixSeconds(clock_.Now()) - 100);
  EXPECT_TRUE(store_->Write([&](WriteTransaction& t) { return t.AppendAudit(record); }).ok());
  Note("alice", "M", "r", "OK");  // without one: now
  const std::vector<v1::AuditRecord> newest_first = Audit({}).records;
  ASSERT_EQ(newest_first.size(), 2u);
  EXPECT_EQ(newest_first[0].time().seconds(), absl::ToUnixSeconds(clock_.Now()));
  EXPECT_EQ(newest_first[1].time().seconds(), record.time().seconds());
  EXPECT_THAT(Sequences({.before = clock_.Now() - absl::Seconds(50)}), ElementsAre(1));
}

TEST_F(SqliteAccessTest, AuditPagesEndByCountAndByBytes) {
  for (int i = 0; i < 5; ++i) Note("a", "m", "r", "OK", 1000);
  const AuditPage first = Audit({.limit = 2});
  EXPECT_EQ(first.records.size(), 2u);
  EXPECT_EQ(first.last_sequence, 4u);
  EXPECT_THAT(Sequences({.before_sequence = 4, .limit = 2}), ElementsAre(3, 2));
  EXPECT_EQ(Audit({.before_sequence = 2, .limit = 2}).last_sequence, 0u);
  const AuditPage small = Audit({.max_bytes = 2500});
  EXPECT_EQ(small.records.size(), 2u);
  EXPECT_EQ(small.last_sequence, 4u);
  // What is larger than a page comes by itself.
  EXPECT_EQ(Audit({.max_bytes = 1}).records.size(), 1u);
}

TEST_F(SqliteAccessTest, OldAuditRecordsGo) {
  Note("a", "m", "r", "OK");
  clock_.Advance(absl::Hours(2));
  Note("b", "m", "r", "OK");
  const absl::Time oldest = clock_.Now() - absl::Hours(1);
  EXPECT_TRUE(store_->Write([&](WriteTransaction& t) { return t.TrimAudit(oldest); }).ok());
  EXPECT_THAT(Sequences({}), ElementsAre(2));
}

}  // namespace
}  // namespace ringleader::store
