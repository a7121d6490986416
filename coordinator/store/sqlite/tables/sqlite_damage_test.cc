// A record that changed on the disk is never handed out: whatever reads it says so, by its name.
#include <SQLiteCpp/SQLiteCpp.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/store/testing/damage.h"
#include "coordinator/store/testing/opened_store.h"
#include "proto/timestamps.h"

namespace ringleader::store {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Property;
using ::testing::ResultOf;

class DamageTest : public testing::OpenedStoreTest {
 protected:
  using ReadCall = std::function<absl::Status(ReadTransaction&)>;

  // Jobs a and b, with a record of every kind of both.
  DamageTest() {
    for (const char* id : {"a", "b"}) {
      Write([&](WriteTransaction& t) -> absl::Status {
        v1::Job job = NewJob(id);
        job.set_owner(absl::StrCat("owner-of-", id));
        job.set_project(absl::StrCat("project-of-", id));
        SetTime(created_, job.mutable_create_time());
        RETURN_IF_ERROR(t.CreateJob(&job));
        v1::Attempt attempt;
        attempt.set_number(1);
        attempt.set_state_reason("an attempt");
        RETURN_IF_ERROR(t.PutAttempt(id, attempt));
        v1::StepReport step;
        step.set_step(1);
        step.set_loss(2.5);
        RETURN_IF_ERROR(t.PutStep(id, step));
        v1::EvalReport eval;
        eval.set_step(1);
        eval.set_loss(2.5);
        RETURN_IF_ERROR(t.PutEval(id, eval));
        v1::CheckpointNotice checkpoint;
        checkpoint.set_step(1);
        RETURN_IF_ERROR(t.PutCheckpoint(id, checkpoint));
        v1::LogLine line;
        line.set_text("a line");
        RETURN_IF_ERROR(t.AppendLogs(id, 1, {line}));
        v1::StepPlan plan;
        plan.set_version(3);
        RETURN_IF_ERROR(t.PutPlan(id, plan));
        v1::Command command;
        command.set_job(id);
        RETURN_IF_ERROR(t.PutCommand(absl::StrCat("n", id), &command));
        v1::Node node;
        node.set_name(absl::StrCat("nodes/n", id));
        RETURN_IF_ERROR(t.PutNode(node));
        StoredToken token;
        token.sha256 = id;
        token.token.set_name(absl::StrCat("tokens/", id));
        token.token.mutable_expire_time()->set_seconds(9'000'000'000);
        RETURN_IF_ERROR(t.CreateToken(token));
        v1::AuditRecord record;
        record.set_caller(id);
        record.set_method("JobService.CreateJob");
        RETURN_IF_ERROR(t.AppendAudit(record));
        return t.PutReply({absl::StrCat("request-", id), "CreateJob", "f"}, "a reply");
      });
    }
  }

  // Turns one bit round in the newest record of the table.
  void Damage(const std::string& table) {
    testing::DamageRecord(options_.path, table,
                          table == "tokens" ? "name = 'tokens/b'"
                          : table == "plans"
                              ? "job = 'b'"
                              : absl::StrCat("rowid = (SELECT MAX(rowid) FROM ", table, ")"));
    Reopen();
  }
  absl::Status Read(const ReadCall& call) { return store_->Read(call); }
  // What is damaged is named, with the file and what to do.
  void ExpectDamaged(const std::string& what, const ReadCall& call) {
    const absl::Status read = Read(call);
    EXPECT_EQ(read.code(), absl::StatusCode::kDataLoss) << what << ": " << read;
    EXPECT_THAT(std::string(read.message()), HasSubstr(options_.path)) << what;
    EXPECT_THAT(std::string(read.message()), HasSubstr(what));
  }
  // A list has the other jobs, and of b what is known all the same.
  void ExpectInTheList(const std::string& what) {
    const absl::Status listed = store_->Read([&](ReadTransaction& t) -> absl::Status {
      ASSIGN_OR_RETURN(const JobPage page, t.ListJobs({.limit = 10}));
      EXPECT_EQ(page.total, 2);
      EXPECT_THAT(page.jobs, ElementsAre(Property(&v1::Job::name, "jobs/a")));
      EXPECT_THAT(
          page.damaged,
          ElementsAre(AllOf(Property(&v1::Job::name, "jobs/b"), Property(&v1::Job::sequence, 2),
                            Property(&v1::Job::spec, Property(&v1::JobSpec::name, "b")),
                            Property(&v1::Job::state, v1::Job::PENDING),
                            Property(&v1::Job::owner, "owner-of-b"),
                            Property(&v1::Job::project, "project-of-b"),
                            Property(&v1::Job::create_time, ResultOf(ToTime, created_)),
                            Property(&v1::Job::state_reason, HasSubstr(what)))));
      return absl::OkStatus();
    });
    EXPECT_EQ(listed, absl::OkStatus());
  }
  void ExpectWhole(const ReadCall& call) { EXPECT_EQ(Read(call), absl::OkStatus()); }

  const absl::Time created_ = absl::FromUnixMicros(1'700'000'000'123'456);
};

TEST_F(DamageTest, OfAJob) {
  Damage("jobs");
  ExpectDamaged("jobs/b", [](ReadTransaction& t) { return t.GetJob("b").status(); });
  ExpectWhole([](ReadTransaction& t) { return t.GetJob("a").status(); });
  ExpectInTheList("checksum differs");
  ExpectDamaged("jobs/b", [](ReadTransaction& t) { return t.ListUnfinishedJobs().status(); });
}

// One that stands where another does is damage, too.
TEST_F(DamageTest, OfAJobsName) {
  store_.reset();
  SQLite::Database(options_.path, SQLite::OPEN_READWRITE)
      .exec("UPDATE jobs SET data = (SELECT data FROM jobs WHERE id = 'a') WHERE id = 'b'");
  Reopen();
  ExpectDamaged("under the name of jobs/b stands jobs/a",
                [](ReadTransaction& t) { return t.GetJob("b").status(); });
  ExpectDamaged("under the name of jobs/b stands jobs/a",
                [](ReadTransaction& t) { return t.ListUnfinishedJobs().status(); });
  ExpectInTheList("stands jobs/a");
}

// What cannot be read of a job that has ended keeps no coordinator from starting.
TEST_F(DamageTest, OfAnAttemptThatFailed) {
  for (const char* id : {"c", "d"}) {
    Create(id, v1::Job::FAILED);
    Write([&](WriteTransaction& t) {
      v1::Attempt attempt;
      attempt.set_number(2);
      return t.PutAttempt(id, attempt);
    });
  }
  Damage("attempts");
  const auto second = [](const v1::Attempt& last) { return last.number() == 2; };
  ExpectWhole([&](ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(const std::vector<v1::Job> failed, t.ListFailedJobs(second));
    EXPECT_EQ(failed.size(), 1u);
    EXPECT_EQ(failed.at(0).name(), "jobs/c");
    EXPECT_EQ(failed.at(0).attempts_size(), 1);
    return absl::OkStatus();
  });
}

TEST_F(DamageTest, OfAnAttempt) {
  Damage("attempts");
  ExpectDamaged("jobs/b, attempts", [](ReadTransaction& t) { return t.GetJob("b").status(); });
  ExpectWhole([](ReadTransaction& t) { return t.GetJob("a").status(); });
  ExpectDamaged("jobs/b, attempts",
                [](ReadTransaction& t) { return t.ListUnfinishedJobs().status(); });
  // Attempts are no part of a list.
  ExpectWhole([](ReadTransaction& t) { return t.ListJobs({.limit = 10}).status(); });
}

TEST_F(DamageTest, OfAStep) {
  Damage("steps");
  for (const ReadCall& call :
       std::vector<ReadCall>{[](ReadTransaction& t) { return t.ListSteps("b", 0, 0, 10).status(); },
                             [](ReadTransaction& t) { return t.SampleSteps("b", 10).status(); },
                             [](ReadTransaction& t) {
                               return t.VisitStepsWithLayers("b", 10, [](const v1::StepReport&) {});
                             }}) {
    ExpectDamaged("jobs/b, steps", call);
  }
  ExpectDamaged("jobs/b, step 1", [](ReadTransaction& t) { return t.GetStep("b", 1).status(); });
  ExpectWhole([](ReadTransaction& t) { return t.ListSteps("a", 0, 0, 10).status(); });
  ExpectWhole([](ReadTransaction& t) { return t.GetStep("a", 1).status(); });
}

// Older steps are thinned out where a new one is written, which does not fail for one of them.
TEST_F(DamageTest, OfAnOldStepIsNoAffairOfANewOne) {
  for (const uint64_t step : {3, 2}) {
    Write([&](WriteTransaction& t) {
      v1::StepReport report;
      report.set_step(step);
      report.add_layers()->set_layer(1);
      return t.PutStep("b", report);
    });
  }
  Damage("steps");  // step 2: the last that was written
  Write([](WriteTransaction& t) {
    v1::StepReport report;
    report.set_step(1088);
    return t.PutStep("b", report);
  });
  ExpectWhole([](ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(const v1::StepReport thinned, t.GetStep("b", 3));
    EXPECT_EQ(thinned.layers_size(), 0);
    return t.GetStep("b", 1088).status();
  });
  ExpectDamaged("jobs/b, step 2", [](ReadTransaction& t) { return t.GetStep("b", 2).status(); });
}

// So are the records of checkpoints.
TEST_F(DamageTest, OfAnOldCheckpointGoesWithIt) {
  Damage("checkpoints");
  Write([](WriteTransaction& t) -> absl::Status {
    v1::CheckpointNotice newer;
    newer.set_step(2);
    RETURN_IF_ERROR(t.PutCheckpoint("b", newer));
    return t.TrimCheckpoints("b", 1);
  });
  ExpectWhole([](ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(const std::vector<v1::CheckpointNotice> left, t.ListCheckpoints("b"));
    EXPECT_EQ(left.size(), 1u);
    return absl::OkStatus();
  });
}

TEST_F(DamageTest, OfAnEvaluation) {
  Damage("evals");
  for (const ReadCall& call :
       std::vector<ReadCall>{[](ReadTransaction& t) { return t.ListEvals("b", 0, 10).status(); },
                             [](ReadTransaction& t) { return t.SampleEvals("b", 10).status(); }}) {
    ExpectDamaged("jobs/b, evaluations", call);
  }
  ExpectWhole([](ReadTransaction& t) { return t.ListEvals("a", 0, 10).status(); });
}

TEST_F(DamageTest, OfACheckpoint) {
  Damage("checkpoints");
  ExpectDamaged("jobs/b, checkpoints",
                [](ReadTransaction& t) { return t.ListCheckpoints("b").status(); });
  ExpectWhole([](ReadTransaction& t) { return t.ListCheckpoints("a").status(); });
}

TEST_F(DamageTest, OfALog) {
  Damage("logs");
  ExpectDamaged("jobs/b, log",
                [](ReadTransaction& t) { return t.ReadLogs({.job = "b"}).status(); });
  ExpectDamaged("jobs/b, log", [](ReadTransaction& t) {
    return t.ReadLogs({.job = "b", .last_lines = 1}).status();
  });
  ExpectWhole([](ReadTransaction& t) { return t.ReadLogs({.job = "a"}).status(); });
}

TEST_F(DamageTest, OfAPlan) {
  Damage("plans");
  ExpectDamaged("jobs/b", [](ReadTransaction& t) { return t.GetPlan("b").status(); });
  ExpectWhole([](ReadTransaction& t) { return t.GetPlan("a").status(); });
}

TEST_F(DamageTest, OfACommand) {
  Damage("commands");
  ExpectDamaged("nodes/nb, commands",
                [](ReadTransaction& t) { return t.ListCommands("nb").status(); });
  ExpectWhole([](ReadTransaction& t) { return t.ListCommands("na").status(); });
}

TEST_F(DamageTest, OfANode) {
  Damage("nodes");
  ExpectDamaged("nodes/nb", [](ReadTransaction& t) { return t.ListNodes().status(); });
}

// It is nobody's. Before, no coordinator started with it.
TEST_F(DamageTest, OfAToken) {
  Damage("tokens");
  ExpectWhole([](ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(const std::vector<StoredToken> tokens, t.ListTokens());
    EXPECT_EQ(tokens.size(), 1u);
    EXPECT_EQ(tokens.at(0).token.name(), "tokens/a");
    return absl::OkStatus();
  });
  Write([](WriteTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(const v1::Token deleted, t.DeleteToken("tokens/b"));
    EXPECT_EQ(deleted.name(), "tokens/b");
    return absl::OkStatus();
  });
  EXPECT_EQ(Refusal([](WriteTransaction& t) { return t.DeleteToken("tokens/b").status(); }),
            absl::StatusCode::kNotFound);
}

TEST_F(DamageTest, OfAnAuditRecord) {
  Damage("audit");
  ExpectDamaged("audit record 2",
                [](ReadTransaction& t) { return t.ListAudit({.limit = 10}).status(); });
  ExpectWhole(
      [](ReadTransaction& t) { return t.ListAudit({.caller = "a", .limit = 10}).status(); });
}

TEST_F(DamageTest, OfAReply) {
  Damage("replies");
  ExpectDamaged("request_id \"request-b\"", [](ReadTransaction& t) {
    return t.FindReply({"request-b", "CreateJob", "f"}).status();
  });
  ExpectWhole([](ReadTransaction& t) {
    return t.FindReply({"request-a", "CreateJob", "f"}).status();
  });
}

}  // namespace
}  // namespace ringleader::store
