// Writes that share a commit, what listeners hear of it, and writes that fail among others.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "coordinator/store/testing/opened_store.h"

namespace ringleader::store {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class SharedCommitsTest : public testing::OpenedStoreTest {
 protected:
  // Writes both in one commit, `first` before `second`; false if they went in commits of their own.
  // Whoever leads runs the bodies of those who wait: one thread for both.
  bool WriteTogether(absl::FunctionRef<absl::Status(WriteTransaction&)> first,
                     absl::FunctionRef<absl::Status(WriteTransaction&)> second,
                     absl::Status* first_status, absl::Status* second_status) {
    absl::Notification entered, go_on;
    std::thread::id first_ran, second_ran;
    std::atomic<int> order = 0, first_place = 0, second_place = 0, waiting = 0;
    std::thread leader([&] {
      Write([&](WriteTransaction&) {
        entered.Notify();
        go_on.WaitForNotification();
        return absl::OkStatus();
      });
    });
    entered.WaitForNotification();
    std::thread one([&] {
      ++waiting;
      *first_status = store_->Write([&](WriteTransaction& t) {
        first_ran = std::this_thread::get_id();
        first_place = ++order;
        return first(t);
      });
    });
    while (waiting < 1) std::this_thread::yield();
    std::thread other([&] {
      ++waiting;
      *second_status = store_->Write([&](WriteTransaction& t) {
        second_ran = std::this_thread::get_id();
        second_place = ++order;
        return second(t);
      });
    });
    while (waiting < 2) std::this_thread::yield();
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    go_on.Notify();
    leader.join();
    one.join();
    other.join();
    return first_ran == second_ran && first_place < second_place;
  }
};

TEST_F(SharedCommitsTest, AWriteThatFailsLeavesNothingAndTakesNobodyDown) {
  int shared = 0;
  for (int attempt = 0; shared < 4 && attempt < 2000; ++attempt) {
    const std::string bad = "bad-" + std::to_string(attempt),
                      good = "good-" + std::to_string(attempt);
    std::vector<Change> changes;
    const auto subscription =
        store_->Subscribe([&](const Change& change) { changes.push_back(change); });
    const uint64_t before = store_->revision();
    uint64_t good_revision = 0;
    const auto fails = [&](WriteTransaction& t) -> absl::Status {
      v1::Job job = NewJob(bad);
      RETURN_IF_ERROR(t.CreateJob(&job));
      RETURN_IF_ERROR(t.Next(Counter::kFencingToken).status());
      return absl::AbortedError("changed my mind");
    };
    const auto holds = [&](WriteTransaction& t) {
      v1::Job job = NewJob(good);
      good_revision = t.revision();
      return t.CreateJob(&job);
    };
    absl::Status failed, held;
    const bool together = attempt % 2 == 0 ? WriteTogether(fails, holds, &failed, &held)
                                           : WriteTogether(holds, fails, &held, &failed);
    if (together) ++shared;
    EXPECT_EQ(failed, absl::AbortedError("changed my mind"));
    EXPECT_EQ(held, absl::OkStatus());
    EXPECT_EQ(good_revision, before + 1);
    EXPECT_EQ(store_->revision(), before + 1);
    ASSERT_EQ(changes.size(), 1u);
    EXPECT_EQ(changes[0].revision, before + 1);
    EXPECT_THAT(changes[0].jobs, ElementsAre(good));
    EXPECT_EQ(Read([&](ReadTransaction& t) { return t.GetJob(bad); }).status(), JobNotFound(bad));
    EXPECT_EQ(Read([&](ReadTransaction& t) { return t.GetJob(good); })->revision(), before + 1);
  }
  EXPECT_EQ(shared, 4) << "they never met in a commit";
  // Numbers that the failed ones drew are drawn again.
  Write([](WriteTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(const uint64_t token, t.Next(Counter::kFencingToken));
    EXPECT_EQ(token, 1u);
    return absl::OkStatus();
  });
}

// Whoever was written along by another leads nothing.
TEST_F(SharedCommitsTest, EachWriteOfManyIsDoneOnceAndByOneAtATime) {
  constexpr int kWriters = 6, kWrites = 40;
  std::atomic<int> inside = 0, most = 0;
  std::vector<int> done(static_cast<size_t>(kWriters) * kWrites, 0);
  std::vector<std::thread> writers;
  writers.reserve(kWriters);
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&, writer] {
      for (int i = 0; i < kWrites; ++i) {
        Write([&](WriteTransaction& t) -> absl::Status {
          most = std::max(most.load(), ++inside);
          std::this_thread::yield();
          const absl::Status status = t.Next(Counter::kCommandId).status();
          ++done[static_cast<size_t>(writer) * kWrites + i];
          --inside;
          return status;
        });
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(most, 1);
  EXPECT_EQ(done, std::vector<int>(done.size(), 1));
  Write([&](WriteTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(const uint64_t next, t.Next(Counter::kCommandId));
    EXPECT_EQ(next, static_cast<uint64_t>(kWriters) * kWrites + 1);
    return absl::OkStatus();
  });
}

TEST_F(SharedCommitsTest, EachWriteOfACommitHasARevisionOfItsOwn) {
  bool shared = false;
  for (int attempt = 0; !shared && attempt < 2000; ++attempt) {
    std::vector<uint64_t> revisions;
    const auto subscription =
        store_->Subscribe([&](const Change& change) { revisions.push_back(change.revision); });
    const uint64_t before = store_->revision();
    const auto create = [&](const char* prefix) {
      return [this, attempt, prefix](WriteTransaction& t) {
        v1::Job job = NewJob(prefix + std::to_string(attempt));
        return t.CreateJob(&job);
      };
    };
    absl::Status first, second;
    shared = WriteTogether(create("a"), create("b"), &first, &second);
    EXPECT_TRUE(first.ok() && second.ok());
    EXPECT_THAT(revisions, ElementsAre(before + 1, before + 2));
    EXPECT_EQ(store_->revision(), before + 2);
  }
  EXPECT_TRUE(shared) << "they never met in a commit";
}

class ChangesTest : public testing::OpenedStoreTest {
 protected:
  ChangesTest() { Create("a"); }
  // What a listener hears of a write; empty if it hears nothing.
  std::vector<Change> Heard(absl::FunctionRef<absl::Status(WriteTransaction&)> body) {
    std::vector<Change> changes;
    const auto subscription = store_->Subscribe([&](const Change& change) {
      EXPECT_GE(store_->revision(), change.revision);
      changes.push_back(change);
    });
    Write(body);
    return changes;
  }
};

TEST_F(ChangesTest, WhateverBelongsToAJobTouchesIt) {
  const std::function<absl::Status(WriteTransaction&)> writes[] = {
      [](WriteTransaction& t) { return t.PutAttempt("a", v1::Attempt()); },
      [](WriteTransaction& t) { return t.PutStep("a", v1::StepReport()); },
      [](WriteTransaction& t) { return t.PutMissingStep("a", v1::StepReport()); },
      [](WriteTransaction& t) { return t.DeleteAttempt("a", 1); },
      [](WriteTransaction& t) { return t.PutPlan("a", v1::StepPlan()); },
      [](WriteTransaction& t) { return t.PutEval("a", v1::EvalReport()); },
      [](WriteTransaction& t) { return t.PutCheckpoint("a", v1::CheckpointNotice()); },
      [](WriteTransaction& t) { return t.TrimCheckpoints("a", 1); },
      [](WriteTransaction& t) {
        v1::Job job = NewJob("a");
        return t.UpdateJob(&job);
      },
      [](WriteTransaction& t) { return t.DeleteJob("a"); },
  };
  for (const auto& write : writes) {
    const std::vector<Change> changes = Heard(write);
    ASSERT_EQ(changes.size(), 1u) << &write - writes;
    EXPECT_THAT(changes[0].jobs, ElementsAre("a")) << &write - writes;
    EXPECT_THAT(changes[0].logs, IsEmpty());
    EXPECT_THAT(changes[0].nodes, IsEmpty());
  }
}

TEST_F(ChangesTest, LogsAndNodesAreToldByName) {
  std::vector<Change> changes = Heard([](WriteTransaction& t) -> absl::Status {
    RETURN_IF_ERROR(t.AppendLogs("a", 1, {v1::LogLine()}));
    RETURN_IF_ERROR(t.AppendLogs("a", 1, {v1::LogLine()}));
    v1::Node node;
    node.set_name("nodes/n1");
    return t.PutNode(node);
  });
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_THAT(changes[0].logs, ElementsAre("a")) << "once";
  EXPECT_THAT(changes[0].nodes, ElementsAre("n1"));
  // No line, no write.
  EXPECT_THAT(Heard([](WriteTransaction& t) { return t.AppendLogs("a", 1, {}); }), IsEmpty());
}

TEST_F(ChangesTest, AWriteIsOneWhateverComesAfterIt) {
  const std::function<absl::Status(WriteTransaction&)> changes_nothing[] = {
      [](WriteTransaction& t) { return t.DeleteCommand(77); },
      [](WriteTransaction& t) { return t.DeleteCommands("a", 1); },
      [](WriteTransaction& t) { return t.TrimAudit(absl::InfinitePast()); },
      [](WriteTransaction& t) { return t.EndRestore(); },
  };
  for (const auto& nothing : changes_nothing) {
    const std::vector<Change> changes = Heard([&](WriteTransaction& t) -> absl::Status {
      RETURN_IF_ERROR(t.PutAttempt("a", v1::Attempt()));
      return nothing(t);
    });
    EXPECT_EQ(changes.size(), 1u) << &nothing - changes_nothing;
  }
}

TEST_F(ChangesTest, WhatChangesNothingIsNotAWrite) {
  EXPECT_THAT(Heard([](WriteTransaction& t) { return t.DeleteCommand(77); }), IsEmpty());
  EXPECT_THAT(Heard([](WriteTransaction& t) { return t.DeleteCommands("a", 1); }), IsEmpty());
  EXPECT_THAT(Heard([](WriteTransaction& t) { return t.PutReply({}, "reply"); }), IsEmpty());
  EXPECT_THAT(Heard([](WriteTransaction& t) { return t.TrimAudit(absl::InfinitePast()); }),
              IsEmpty());
  EXPECT_THAT(Heard([](WriteTransaction& t) { return t.EndRestore(); }), IsEmpty());
  EXPECT_EQ(store_->revision(), 1u);
  // These are, though no job hears of them.
  for (const auto& write : std::vector<std::function<absl::Status(WriteTransaction&)>>{
           [](WriteTransaction& t) { return t.Next(Counter::kSessionEpoch).status(); },
           [](WriteTransaction& t) { return t.SetAppliedSequence("n1", "i", 1); },
           [](WriteTransaction& t) { return t.PutReply({.id = "r"}, "reply"); },
           [](WriteTransaction& t) { return t.AppendAudit(v1::AuditRecord()); }}) {
    EXPECT_EQ(Heard(write).size(), 1u);
  }
  EXPECT_EQ(store_->revision(), 5u);
  Reopen();
  EXPECT_EQ(store_->revision(), 5u);
}

}  // namespace
}  // namespace ringleader::store
