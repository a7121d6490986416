#include "coordinator/store/sqlite/sqlite_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "coordinator/store/testing/opened_store.h"

namespace ringleader::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class SqliteStoreTest : public testing::OpenedStoreTest {
 protected:
  SqliteStoreTest()
      : OpenedStoreTest({.on_commit = [this](absl::Duration duration, int writes) {
          group_sizes_.push_back(writes);
          last_duration_ = duration;
        }}) {}

  std::vector<int> group_sizes_;
  absl::Duration last_duration_;
};

TEST_F(SqliteStoreTest, JobSurvivesReopeningWithItsAttempts) {
  Write([](WriteTransaction& t) -> absl::Status {
    v1::Job job = NewJob("a");
    RETURN_IF_ERROR(t.CreateJob(&job));
    EXPECT_EQ(job.revision(), t.revision());
    v1::Attempt attempt;
    for (uint32_t number : {2u, 1u}) {
      attempt.set_number(number);
      RETURN_IF_ERROR(t.PutAttempt("a", attempt));
    }
    job.set_state(v1::Job::RUNNING);
    *job.add_attempts() = attempt;  // is written by itself
    return t.UpdateJob(&job);
  });
  const uint64_t revision = store_->revision();
  Reopen();
  EXPECT_EQ(store_->revision(), revision);
  const auto job = Read([](ReadTransaction& t) { return t.GetJob("a"); });
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->state(), v1::Job::RUNNING);
  EXPECT_EQ(job->revision(), revision);
  ASSERT_THAT(job->attempts(), SizeIs(2));
  EXPECT_EQ(job->attempts(0).number(), 1u);
  EXPECT_THAT(List({.terms = {{.value = "RUNNING"}}}), ElementsAre("a"));
}

TEST_F(SqliteStoreTest, CreateRefusesTakenId) {
  Create("a");
  v1::Job job = NewJob("a");
  const absl::Status status = store_->Write([&](WriteTransaction& t) { return t.CreateJob(&job); });
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), HasSubstr("jobs/a exists already"));
}

// Clients wait for the revision of what they asked for.
TEST_F(SqliteStoreTest, AJobHasTheRevisionOfItsLastWrite) {
  Create("a");
  Create("b");
  v1::Job job = NewJob("a", v1::Job::RUNNING);
  Write([&](WriteTransaction& t) { return t.UpdateJob(&job); });
  EXPECT_EQ(job.revision(), store_->revision());
  const auto stored = [this](const char* id) {
    return Read([&](ReadTransaction& t) { return t.GetJob(id); })->revision();
  };
  EXPECT_EQ(stored("a"), store_->revision());
  EXPECT_EQ(stored("b"), store_->revision() - 1);
}

TEST_F(SqliteStoreTest, FailedWriteLeavesNothing) {
  Create("a");
  const uint64_t before = store_->revision();
  const absl::Status status = store_->Write([](WriteTransaction& t) -> absl::Status {
    v1::Job job = NewJob("b");
    RETURN_IF_ERROR(t.CreateJob(&job));
    return absl::AbortedError("changed my mind");
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(store_->revision(), before);
  EXPECT_THAT(List({}), ElementsAre("a"));
}

TEST_F(SqliteStoreTest, WriteThatOnlyReadsTakesNoRevision) {
  Create("a");
  const uint64_t before = store_->revision();
  Write([](WriteTransaction& t) { return t.GetJob("a").status(); });
  EXPECT_EQ(store_->revision(), before);
}

TEST_F(SqliteStoreTest, ListFiltersAndPagesNewestFirst) {
  for (int i = 0; i < 5; ++i) {
    Write([&](WriteTransaction& t) {
      v1::Job job = NewJob(absl::StrCat("j", i), i % 2 == 0 ? v1::Job::RUNNING : v1::Job::PENDING);
      (*job.mutable_spec()->mutable_labels())["team"] = i < 3 ? "ocean" : "air";
      if (i == 4) (*job.mutable_spec()->mutable_labels())["urgent"] = "";
      return t.CreateJob(&job);
    });
  }
  using Term = JobTerm;
  EXPECT_THAT(List({.terms = {{.value = "RUNNING"}}}), ElementsAre("j4", "j2", "j0"));
  EXPECT_THAT(List({.terms = {{.op = Term::Operator::kNotEquals, .value = "RUNNING"}}}),
              ElementsAre("j3", "j1"));
  EXPECT_THAT(List({.terms = {{.value = "RUNNING"},
                              {.field = Term::Field::kLabel, .label = "team", .value = "ocean"}}}),
              ElementsAre("j2", "j0"));
  EXPECT_THAT(List({.terms = {{.field = Term::Field::kLabel,
                               .label = "urgent",
                               .op = Term::Operator::kHas}}}),
              ElementsAre("j4"));
  EXPECT_THAT(List({.terms = {{.field = Term::Field::kName, .value = "j3"}}}), ElementsAre("j3"));

  const auto first = Read([](ReadTransaction& t) { return t.ListJobs({.limit = 3}); });
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->total, 5);
  ASSERT_NE(first->last_sequence, 0u);
  EXPECT_THAT(List({.before_sequence = first->last_sequence, .limit = 3}), ElementsAre("j1", "j0"));
  const auto last = Read(
      [&](ReadTransaction& t) { return t.ListJobs({.before_sequence = first->last_sequence}); });
  EXPECT_EQ(last->last_sequence, 0u);
}

TEST_F(SqliteStoreTest, UnfinishedJobsAndCounts) {
  Create("done", v1::Job::SUCCEEDED);
  Create("running", v1::Job::RUNNING);
  Create("waiting", v1::Job::PENDING);
  const auto jobs = Read([](ReadTransaction& t) { return t.ListUnfinishedJobs(); });
  ASSERT_THAT(*jobs, SizeIs(2));
  EXPECT_EQ(jobs->at(0).spec().name(), "running");
  const auto counts = Read([](ReadTransaction& t) { return t.CountJobs(); });
  EXPECT_THAT(*counts, SizeIs(3));
}

// Ranks of the last attempt may be alive; those before it are known to have ended.
TEST_F(SqliteStoreTest, FailedJobsAreFoundByTheirLastAttempt) {
  const auto put = [this](const std::string& id, v1::Job::State state,
                          const std::vector<const char*>& attempts) {
    Create(id, state);
    v1::Attempt attempt;
    for (const char* reason : attempts) {
      attempt.set_number(attempt.number() + 1);
      attempt.set_state_reason(reason);
      Write([&](WriteTransaction& t) { return t.PutAttempt(id, attempt); });
    }
  };
  put("z", v1::Job::FAILED, {"ended", "lost"});
  put("known", v1::Job::FAILED, {"lost", "ended"});
  put("runs", v1::Job::RUNNING, {"lost"});
  put("done", v1::Job::SUCCEEDED, {"lost"});
  put("never-ran", v1::Job::FAILED, {});
  put("b", v1::Job::FAILED, {"lost"});
  const auto failed = Read([](ReadTransaction& t) {
    return t.ListFailedJobs([](const v1::Attempt& last) { return last.state_reason() == "lost"; });
  });
  ASSERT_TRUE(failed.ok()) << failed.status();
  ASSERT_THAT(*failed, SizeIs(2));
  EXPECT_EQ(failed->at(0).spec().name(), "z");
  EXPECT_EQ(failed->at(0).attempts_size(), 2);
  EXPECT_EQ(failed->at(1).spec().name(), "b");
  EXPECT_EQ(failed->at(1).attempts_size(), 1);
}

TEST_F(SqliteStoreTest, DeleteTakesEverythingOfTheJob) {
  Create("a");
  Write([](WriteTransaction& t) -> absl::Status {
    RETURN_IF_ERROR(t.AppendLogs("a", 1, {v1::LogLine()}));
    v1::Command command;
    command.set_job("a");
    return t.PutCommand("n1", &command);
  });
  Write([](WriteTransaction& t) { return t.DeleteJob("a"); });
  EXPECT_THAT(*Read([](ReadTransaction& t) { return t.ListCommands("n1"); }), IsEmpty());
  // A late report of a deleted job finds nothing to belong to.
  const absl::Status late =
      store_->Write([](WriteTransaction& t) { return t.AppendLogs("a", 1, {v1::LogLine()}); });
  EXPECT_EQ(late.code(), absl::StatusCode::kNotFound);
  Create("a");
  EXPECT_THAT(Read([](ReadTransaction& t) { return t.ReadLogs({.job = "a"}); })->lines, IsEmpty());
}

TEST_F(SqliteStoreTest, CommandsStayUntilAcknowledged) {
  Create("a");
  std::vector<uint64_t> ids;
  Write([&](WriteTransaction& t) -> absl::Status {
    for (uint32_t attempt : {1u, 1u, 2u}) {
      v1::Command command;
      command.set_job("a");
      command.set_attempt(attempt);
      RETURN_IF_ERROR(t.PutCommand("n1", &command));
      ids.push_back(command.command_id());
    }
    return t.DeleteCommand(ids[0]);
  });
  Reopen();
  auto commands = Read([](ReadTransaction& t) { return t.ListCommands("n1"); });
  ASSERT_THAT(*commands, SizeIs(2));
  EXPECT_EQ(commands->at(0).command_id(), ids[1]);
  Write([](WriteTransaction& t) { return t.DeleteCommands("a", 1); });
  commands = Read([](ReadTransaction& t) { return t.ListCommands("n1"); });
  ASSERT_THAT(*commands, SizeIs(1));
  EXPECT_EQ(commands->at(0).command_id(), ids[2]);
}

TEST_F(SqliteStoreTest, CountersAndAppliedSequencesSurvive) {
  const auto next = [&] {
    uint64_t value = 0;
    Write([&](WriteTransaction& t) -> absl::Status {
      ASSIGN_OR_RETURN(value, t.Next(Counter::kFencingToken));
      return t.SetAppliedSequence("n1", "first", value * 10);
    });
    return value;
  };
  EXPECT_EQ(next(), 1u);
  EXPECT_EQ(next(), 2u);
  Reopen();
  EXPECT_EQ(next(), 3u);
  EXPECT_EQ(*Read([](ReadTransaction& t) { return t.GetAppliedSequence("n1", "first"); }), 30u);
  EXPECT_EQ(*Read([](ReadTransaction& t) { return t.GetAppliedSequence("n1", "second"); }), 0u);
  for (int i = 0; i < 10; ++i) {
    Write([&](WriteTransaction& t) {
      return t.SetAppliedSequence("n1", absl::StrCat("later", i), 1);
    });
  }
  EXPECT_EQ(*Read([](ReadTransaction& t) { return t.GetAppliedSequence("n1", "first"); }), 0u);
  EXPECT_EQ(*Read([](ReadTransaction& t) { return t.GetAppliedSequence("n1", "later9"); }), 1u);
  EXPECT_EQ(*Read([](ReadTransaction& t) { return t.GetNewestIncarnation("n1"); }), "later9");
  EXPECT_EQ(*Read([](ReadTransaction& t) { return t.GetNewestIncarnation("n2"); }), "");
  // One that came back.
  Write([](WriteTransaction& t) { return t.SetAppliedSequence("n1", "later5", 2); });
  EXPECT_EQ(*Read([](ReadTransaction& t) { return t.GetNewestIncarnation("n1"); }), "later5");
}

TEST_F(SqliteStoreTest, ProcessesOfOtherNodesMakeNoneOfANodeForgotten) {
  const auto set = [&](const std::string& node, const std::string& incarnation) {
    Write([&](WriteTransaction& t) { return t.SetAppliedSequence(node, incarnation, 30); });
  };
  set("n1", "first");
  for (int i = 0; i < 10; ++i) set(absl::StrCat("other", i), absl::StrCat("of-other", i));
  set("n1", "second");
  EXPECT_EQ(*Read([](ReadTransaction& t) { return t.GetAppliedSequence("n1", "first"); }), 30u);
}

TEST_F(SqliteStoreTest, RequestIsDoneOnce) {
  int runs = 0;
  const auto create = [&](const RequestKey& key) {
    absl::StatusOr<v1::Job> reply;
    const absl::Status status = store_->Write([&](WriteTransaction& t) {
      reply = Once<v1::Job>(t, key, [&]() -> absl::StatusOr<v1::Job> {
        ++runs;
        v1::Job job = NewJob(absl::StrCat("j", runs));
        RETURN_IF_ERROR(t.CreateJob(&job));
        return job;
      });
      return reply.status();
    });
    return status.ok() ? reply : status;
  };
  const RequestKey key{.id = "r1", .method = "CreateJob", .fingerprint = "f"};
  ASSERT_TRUE(create(key).ok());
  Reopen();
  EXPECT_EQ(create(key)->name(), "jobs/j1");
  EXPECT_EQ(runs, 1);
  EXPECT_EQ(create({.id = "r1", .method = "CreateJob", .fingerprint = "other"}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create({.id = "r1", .method = "CancelJob", .fingerprint = "f"}).status().code(),
            absl::StatusCode::kInvalidArgument);
  clock_.Advance(kReplyLifetime + absl::Hours(1));
  ASSERT_TRUE(create({.id = "r2", .method = "CreateJob"}).ok());
  EXPECT_EQ(create(key)->name(), "jobs/j3");  // forgotten
}

TEST_F(SqliteStoreTest, NodesSurvive) {
  v1::Node node;
  node.set_name("nodes/n1");
  node.set_state(v1::Node::DRAINING);
  Write([&](WriteTransaction& t) { return t.PutNode(node); });
  Reopen();
  const std::vector<v1::Node> nodes = *Read([](ReadTransaction& t) { return t.ListNodes(); });
  ASSERT_THAT(nodes, SizeIs(1));
  EXPECT_EQ(nodes[0].name(), "nodes/n1");
  EXPECT_EQ(nodes[0].state(), v1::Node::DRAINING);
}

TEST_F(SqliteStoreTest, OfANodeThatGoesItsNewestProcessStaysKnown) {
  v1::Node node;
  node.set_name("nodes/n1");
  Write([&](WriteTransaction& t) -> absl::Status {
    RETURN_IF_ERROR(t.SetAppliedSequence("n1", "folder.1", 3));
    return t.PutNode(node);
  });
  std::vector<std::string> touched;
  {
    const auto subscription = store_->Subscribe([&](const Change& change) {
      touched.insert(touched.end(), change.nodes.begin(), change.nodes.end());
    });
    Write([](WriteTransaction& t) { return t.DeleteNode("n1"); });
  }
  EXPECT_THAT(touched, ElementsAre("n1"));
  Write([](WriteTransaction& t) { return t.DeleteNode("n1"); });  // it is not there
  Reopen();
  EXPECT_THAT(*Read([](ReadTransaction& t) { return t.ListNodes(); }), IsEmpty());
  EXPECT_EQ(*Read([](ReadTransaction& t) { return t.GetNewestIncarnation("n1"); }), "folder.1");
}

TEST_F(SqliteStoreTest, ListenersHearOfEveryCommitInOrder) {
  std::vector<uint64_t> revisions;
  std::vector<std::string> jobs;
  {
    const auto subscription = store_->Subscribe([&](const Change& change) {
      revisions.push_back(change.revision);
      jobs.insert(jobs.end(), change.jobs.begin(), change.jobs.end());
    });
    Create("a");
    Create("b");
  }
  Create("c");
  EXPECT_THAT(jobs, ElementsAre("a", "b"));
  EXPECT_THAT(revisions, ElementsAre(1u, 2u));
}

// Writers that arrive during a commit share the next one; a failing one among them takes nobody
// down.
TEST_F(SqliteStoreTest, WaitingWritersShareOneCommit) {
  constexpr int kFollowers = 6;
  absl::Notification entered, go_on;
  std::thread first([&] {
    Write([&](WriteTransaction& t) {
      entered.Notify();
      go_on.WaitForNotification();
      v1::Job job = NewJob("first");
      return t.CreateJob(&job);
    });
  });
  entered.WaitForNotification();
  std::atomic<int> failed = 0;
  std::vector<std::thread> followers;
  followers.reserve(kFollowers);
  for (int i = 0; i < kFollowers; ++i) {
    followers.emplace_back([&, i] {
      const absl::Status status = store_->Write([&](WriteTransaction& t) {
        v1::Job job = NewJob(i == 0 ? "first" : absl::StrCat("f", i));
        return t.CreateJob(&job);
      });
      if (!status.ok()) ++failed;
    });
  }
  go_on.Notify();
  first.join();
  for (std::thread& follower : followers) follower.join();
  EXPECT_EQ(failed, 1);
  EXPECT_THAT(List({}), SizeIs(kFollowers));
  EXPECT_EQ(store_->revision(), static_cast<uint64_t>(kFollowers));
  int writes = 0;
  for (const int size : group_sizes_) writes += size;
  EXPECT_EQ(writes, kFollowers);
}

TEST_F(SqliteStoreTest, ACommitLastsAsLongAsItsWrites) {
  constexpr absl::Duration kLeast = absl::Milliseconds(1);
  Write([](WriteTransaction& t) {
    const absl::Time begun = absl::Now();
    while (absl::Now() - begun < kLeast) std::this_thread::yield();
    return t.Next(Counter::kCommandId).status();
  });
  EXPECT_GE(last_duration_, kLeast);
}

// Whoever is first waits for no more than so many others.
TEST_F(SqliteStoreTest, ACommitHoldsAtMost64Writes) {
  constexpr int kWriters = 80, kMost = 64;
  int largest = 0;
  for (int attempt = 0; largest < kMost && attempt < 100; ++attempt) {
    absl::Notification entered, go_on;
    std::thread first([&] {
      Write([&](WriteTransaction&) {
        entered.Notify();
        go_on.WaitForNotification();
        return absl::OkStatus();
      });
    });
    entered.WaitForNotification();
    std::atomic<int> waiting = 0;
    std::vector<std::thread> others;
    others.reserve(kWriters);
    for (int i = 0; i < kWriters; ++i) {
      others.emplace_back([&] {
        ++waiting;
        Write([](WriteTransaction& t) { return t.Next(Counter::kCommandId).status(); });
      });
    }
    while (waiting < kWriters) std::this_thread::yield();
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    go_on.Notify();
    first.join();
    for (std::thread& other : others) other.join();
    largest = *std::max_element(group_sizes_.begin(), group_sizes_.end());
  }
  EXPECT_EQ(largest, kMost);
}

// What a burst of readers opened is closed again, but for a few connections.
TEST_F(SqliteStoreTest, ReadersThatMetLeaveEightConnections) {
  Create("a");
  constexpr int kReaders = 20;
  std::atomic<int> inside = 0;
  absl::Notification all_inside;
  std::vector<std::thread> readers;
  readers.reserve(kReaders);
  for (int i = 0; i < kReaders; ++i) {
    readers.emplace_back([&] {
      EXPECT_TRUE(Read([&](ReadTransaction& t) {
                    if (++inside == kReaders) all_inside.Notify();
                    EXPECT_TRUE(all_inside.WaitForNotificationWithTimeout(absl::Minutes(1)));
                    return t.GetJob("a");
                  }).ok());
    });
  }
  for (std::thread& reader : readers) reader.join();
  int open = 0;  // each connection opens the log of writes
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string file = std::filesystem::read_symlink(entry, gone).string();
    if (absl::EndsWith(file, "coordinator.db-wal")) ++open;
  }
  EXPECT_EQ(open, 8 + 1) << "and the writer's";
}

TEST_F(SqliteStoreTest, AnEndInGoodOrderLeavesNoLogOfWrites) {
  for (const int64_t reserve_bytes : {0, 4096}) {
    options_.reserve_bytes = reserve_bytes;
    Reopen();
    Create(absl::StrCat("with-", reserve_bytes));
    EXPECT_TRUE(std::filesystem::exists(options_.path + "-wal"));
    store_.reset();
    EXPECT_FALSE(std::filesystem::exists(options_.path + "-wal")) << reserve_bytes;
  }
}

TEST_F(SqliteStoreTest, ReaderSeesOneRevisionWhileOthersWrite) {
  Create("a");
  const absl::Status status = store_->Read([&](ReadTransaction& t) -> absl::Status {
    EXPECT_EQ(t.ListJobs({})->total, 1);
    std::thread([&] { Create("b"); }).join();
    EXPECT_EQ(t.ListJobs({})->total, 1);
    EXPECT_EQ(t.revision(), 1u);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok());
  EXPECT_THAT(List({}), SizeIs(2));
}

TEST(NamesTest, IdsAreChecked) {
  EXPECT_EQ(*JobIdFromName("jobs/a-1"), "a-1");
  EXPECT_EQ(*NodeIdFromName("nodes/host.example"), "host.example");
  EXPECT_EQ(*JobIdFromName("jobs/azAZ09-._"), "azAZ09-._");
  for (const char* name : {"", "jobs/", "a", "nodes/a", "jobs/a/b", "jobs/a b", "jobs/a'"}) {
    EXPECT_FALSE(JobIdFromName(name).ok()) << name;
  }
  const std::string longest(253, 'a');
  EXPECT_EQ(*JobIdFromName("jobs/" + longest), longest);
  EXPECT_FALSE(JobIdFromName("jobs/a" + longest).ok());
}

}  // namespace
}  // namespace ringleader::store
