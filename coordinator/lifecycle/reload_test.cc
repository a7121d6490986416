// What becomes of requests whose commit fails, and of the controller when the store cannot be read
// back after it.
#include <SQLiteCpp/SQLiteCpp.h>

#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "coordinator/lifecycle/testing/controller_test.h"
#include "coordinator/store/testing/forwarding_store.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class FailedCommitTest : public testing::ControllerTest {};

TEST_F(FailedCommitTest, NothingIsDoneThatTheAuditLogCannotHold) {
  SQLite::Database file(dir_.File("db"), SQLite::OPEN_READWRITE, /*aBusyTimeoutMs=*/60'000);
  file.exec("CREATE TRIGGER refuse BEFORE INSERT ON audit BEGIN SELECT RAISE(ABORT, 'no'); END");
  const auto create = [&] {
    return Do([&] { return controller_->CreateJob(Spec("j"), {.audit = v1::AuditRecord()}); });
  };
  const auto stored = [&] {
    return sqlite_->Read([](store::ReadTransaction& t) { return t.GetJob("j").status(); });
  };
  EXPECT_FALSE(create().ok());
  EXPECT_EQ(stored().code(), absl::StatusCode::kNotFound);
  file.exec("DROP TRIGGER refuse");
  EXPECT_EQ(create().status(), absl::OkStatus());
  EXPECT_EQ(stored(), absl::OkStatus());
}

TEST_F(FailedCommitTest, TheAuditLogHoldsOfAJobsRequestsThoseThatWereGranted) {
  for (const bool granted : {true, false}) {
    const auto created =
        Do([&] { return controller_->CreateJob(Spec("j"), {.audit = v1::AuditRecord()}); });
    EXPECT_EQ(created.ok(), granted) << created.status();
    const absl::Status read = sqlite_->Read([&](store::ReadTransaction& t) {
      const auto page = t.ListAudit({});
      EXPECT_THAT(page->records, ::testing::SizeIs(1)) << granted;
      return page.status();
    });
    EXPECT_EQ(read, absl::OkStatus());
  }
}

TEST_F(FailedCommitTest, WhatCannotBeWrittenNeverHappened) {
  auto session = RunJob();
  store_.full = true;
  const absl::StatusOr<v1::Job> refused = Create("other");
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  ASSERT_TRUE(session->closed().has_value());
  EXPECT_EQ(*session->closed(),
            absl::UnavailableError(absl::StrCat(
                "nothing can be recorded (", refused.status().message(), "); reconnect, please")));
  store_.full = false;
  auto again = Connect("a", "folder.1", {Running()});
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  EXPECT_TRUE(Create("other").ok());
  Say(again, 4, Log("still here"));
  EXPECT_EQ(again->acknowledged(), 4);
}

// A store that another program holds locked for a while.
class LockedStore : public store::testing::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Read(absl::FunctionRef<absl::Status(store::ReadTransaction&)> body) override {
    if (damaged) return absl::DataLossError("the record of jobs/q is damaged");
    if (locked) return absl::UnavailableError("another program holds it locked");
    return ForwardingStore::Read(body);
  }

  std::atomic<bool> locked = false, damaged = false;
};

class ReloadTest : public testing::ControllerTest {
 protected:
  ReloadTest() { store_.MoveTo(&locked_); }
  ~ReloadTest() override { controller_.reset(); }

  // A batch fails, and the store cannot be read back.
  void LoseTheStore(const std::function<void()>& batch) {
    store_.full = true;
    locked_.locked = true;
    batch();
    store_.full = false;
  }
  v1::Node::State StateOf(const std::string& id) {
    for (const v1::Node& node : controller_->ListNodes()) {
      if (node.name() == "nodes/" + id) return node.state();
    }
    return v1::Node::STATE_UNSPECIFIED;
  }

  LockedStore locked_{sqlite_.get()};
};

TEST_F(ReloadTest, NothingIsDecidedUntilTheStoreCanBeReadAgain) {
  auto session = RunJob();
  Connect("b", "b.1");
  ASSERT_TRUE(Do([&] { return controller_->DrainNode("b", {}); }).ok());
  controller_->RunOnce();
  ASSERT_EQ(StateOf("b"), v1::Node::DRAINED);
  LoseTheStore([&] { EXPECT_FALSE(Create("k").ok()); });
  EXPECT_TRUE(session->closed().has_value());
  const absl::Status refused = Create("k").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("another program holds it locked"));
  auto early = Connect("a", "folder.1", {Running()});
  EXPECT_TRUE(early->closed().has_value());
  EXPECT_THAT(early->Commands(), IsEmpty());
  EXPECT_EQ(StateOf("b"), v1::Node::DRAINED);
  locked_.locked = false;
  session = Connect("a", "folder.1", {Running()});
  for (const v1::Command& command : session->Commands()) EXPECT_FALSE(command.has_stop());
  EXPECT_EQ(StateOf("b"), v1::Node::DRAINED);
  Say(session, 4, Step(1, 0));
  Say(session, 5, Step(1, 1));
  EXPECT_THAT(Steps(), ElementsAre(1));
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  EXPECT_TRUE(Create("k").ok());
}

TEST_F(ReloadTest, WhatABatchThatFailedWouldHaveToldIsNeverTold) {
  auto session = RunJob();
  ASSERT_EQ(session->acknowledged(), 3u);
  LoseTheStore([&] { Say(session, 4, Log("a line")); });
  Create("k").IgnoreError();
  locked_.locked = false;
  ASSERT_TRUE(Create("l").ok());
  EXPECT_EQ(session->acknowledged(), 3u);
  EXPECT_THAT(LogTexts(), IsEmpty());
  session = Connect("a", "folder.1", {Running()});
  Say(session, 4, Log("a line"));
  EXPECT_EQ(session->acknowledged(), 4u);
  EXPECT_THAT(LogTexts(), ElementsAre("a line"));
}

// No later try would succeed: the process ends, and says which record it was.
TEST_F(ReloadTest, DamageIsToldOnce) {
  std::vector<absl::Status> told;
  controller_ = *JobController::Create(options_, &store_, &plans_, &clock_, nullptr,
                                       [&](const absl::Status& damage) { told.push_back(damage); });
  LoseTheStore([&] { EXPECT_FALSE(Create("k").ok()); });
  EXPECT_THAT(told, IsEmpty());
  locked_.damaged = true;
  for (int i = 0; i < 3; ++i) controller_->RunOnce();
  EXPECT_THAT(told, ElementsAre(absl::DataLossError("the record of jobs/q is damaged")));
}

// Nobody can do anything about a job that has ended whose record is damaged, and nobody else is
// any the worse for it.
TEST_F(ReloadTest, ADamagedRecordOfAJobThatEndedIsNobodyElsesAffair) {
  auto session = RunJob();
  ASSERT_TRUE(Do([&] { return controller_->CancelJob("j", "", {}); }).ok());
  for (const uint32_t rank : {0u, 1u}) {
    v1::AttemptEvent exited;
    exited.mutable_trainer_exited()->set_rank(rank);
    exited.mutable_trainer_exited()->set_outcome(v1::TrainerExited::STOPPED);
    Say(session, 4 + rank, exited);
  }
  ASSERT_EQ(Job().state(), v1::Job::CANCELLED);
  controller_.reset();
  sqlite_.reset();
  {
    std::ifstream in(dir_.File("db"), std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(in), {}};
    size_t at = bytes.find("cancelled by a user");
    ASSERT_NE(at, std::string::npos);
    for (; at != std::string::npos; at = bytes.find("cancelled by a user", at)) bytes[at] ^= 1;
    std::ofstream(dir_.File("db"), std::ios::binary) << bytes;
  }
  sqlite_ = Open();
  store_.MoveTo(sqlite_.get());
  Restart();
  session = Connect("a", "folder.1");
  Say(session, 6, Log("a late line"));
  EXPECT_FALSE(session->closed().has_value());
  EXPECT_EQ(session->acknowledged(), 6u);
  for (const bool is_delete : {false, true}) {
    const absl::Status refused = Do([&]() -> absl::StatusOr<v1::Job> {
                                   if (!is_delete) return controller_->ResumeJob("j", "", {});
                                   const absl::Status deleted = controller_->DeleteJob("j", "", {});
                                   if (deleted.ok()) return v1::Job();
                                   return deleted;
                                 }).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << is_delete;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("the record of jobs/j is damaged"));
  }
  EXPECT_FALSE(session->closed().has_value());
}

}  // namespace
}  // namespace ringleader::lifecycle
