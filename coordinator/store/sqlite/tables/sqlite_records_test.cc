// What each kind of record keeps, in which order it comes back, and what goes with what.
#include <SQLiteCpp/SQLiteCpp.h>
#include <gmock/gmock.h>
#include <sqlite3.h>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/store/sqlite/sqlite_connection.h"
#include "coordinator/store/testing/opened_store.h"

namespace ringleader::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using RecordsTest = testing::OpenedStoreTest;

TEST_F(RecordsTest, OfAJobThatDoesNotExistNothingIsKept) {
  v1::Job job = NewJob("x");
  v1::Command command;
  command.set_job("x");
  EXPECT_EQ(store_->Write([&](WriteTransaction& t) { return t.UpdateJob(&job); }),
            absl::NotFoundError("jobs/x does not exist"));
  const std::function<absl::Status(WriteTransaction&)> writes[] = {
      [](WriteTransaction& t) { return t.DeleteJob("x"); },
      [](WriteTransaction& t) { return t.PutAttempt("x", v1::Attempt()); },
      [](WriteTransaction& t) { return t.PutStep("x", v1::StepReport()); },
      [](WriteTransaction& t) { return t.PutMissingStep("x", v1::StepReport()); },
      [](WriteTransaction& t) { return t.PutEval("x", v1::EvalReport()); },
      [](WriteTransaction& t) { return t.PutCheckpoint("x", v1::CheckpointNotice()); },
      [](WriteTransaction& t) { return t.AppendLogs("x", 1, {v1::LogLine()}); },
      [&](WriteTransaction& t) { return t.PutCommand("n1", &command); },
      [](WriteTransaction& t) { return t.GetJob("x").status(); },
  };
  for (const auto& write : writes) {
    EXPECT_EQ(Refusal(write), absl::StatusCode::kNotFound) << &write - writes;
  }
  EXPECT_EQ(store_->revision(), 0u);
}

TEST_F(RecordsTest, ADeletedJobsRecordsAreNotTheNextOnesOfItsName) {
  const auto fill = [&] {
    Write([](WriteTransaction& t) -> absl::Status {
      v1::Job job = NewJob("a");
      (*job.mutable_spec()->mutable_labels())["team"] = "ocean";
      RETURN_IF_ERROR(t.CreateJob(&job));
      RETURN_IF_ERROR(t.PutAttempt("a", v1::Attempt()));
      RETURN_IF_ERROR(t.PutStep("a", v1::StepReport()));
      RETURN_IF_ERROR(t.PutEval("a", v1::EvalReport()));
      RETURN_IF_ERROR(t.PutCheckpoint("a", v1::CheckpointNotice()));
      return t.AppendLogs("a", 1, {v1::LogLine()});
    });
  };
  fill();
  Create("b");
  Write([](WriteTransaction& t) { return t.PutStep("b", v1::StepReport()); });
  Write([](WriteTransaction& t) { return t.DeleteJob("a"); });
  Create("a");
  EXPECT_EQ(Read([](ReadTransaction& t) { return t.GetJob("a"); })->attempts_size(), 0);
  EXPECT_THAT(Read([](ReadTransaction& t) { return t.ListSteps("a", 0, 0, 9); })->steps, IsEmpty());
  EXPECT_THAT(Read([](ReadTransaction& t) { return t.ListEvals("a", 0, 100); })->evals, IsEmpty());
  EXPECT_THAT(*Read([](ReadTransaction& t) { return t.ListCheckpoints("a"); }), IsEmpty());
  EXPECT_THAT(List({.terms = {{.field = JobTerm::Field::kLabel,
                               .label = "team",
                               .op = JobTerm::Operator::kHas}}}),
              IsEmpty());
  // Another job's stay. (Step 0 is none that a page after step 0 holds.)
  Write([](WriteTransaction& t) {
    v1::StepReport step;
    step.set_step(1);
    return t.PutStep("b", step);
  });
  EXPECT_EQ(Read([](ReadTransaction& t) { return t.ListSteps("b", 0, 0, 9); })->steps.size(), 1u);
  // Offsets of the log begin anew with the job.
  Write([](WriteTransaction& t) { return t.AppendLogs("a", 1, {v1::LogLine()}); });
  EXPECT_EQ(Read([](ReadTransaction& t) { return t.ReadLogs({.job = "a"}); })->lines[0].offset(),
            1u);
}

TEST_F(RecordsTest, FiltersThatExclude) {
  for (const char* id : {"none", "air", "ocean"}) {
    Write([&](WriteTransaction& t) {
      v1::Job job = NewJob(id, v1::Job::RUNNING);
      if (id != std::string("none")) (*job.mutable_spec()->mutable_labels())["team"] = id;
      job.set_owner(id);
      return t.CreateJob(&job);
    });
  }
  using Field = JobTerm::Field;
  constexpr auto kNot = JobTerm::Operator::kNotEquals;
  EXPECT_THAT(
      List({.terms = {{.field = Field::kLabel, .label = "team", .op = kNot, .value = "air"}}}),
      ElementsAre("ocean", "none"))
      << "also those without the label";
  EXPECT_THAT(List({.terms = {{.field = Field::kName, .op = kNot, .value = "air"}}}),
              ElementsAre("ocean", "none"));
  EXPECT_THAT(List({.terms = {{.field = Field::kOwner, .op = kNot, .value = "air"}}}),
              ElementsAre("ocean", "none"));
  EXPECT_THAT(
      List({.terms = {{.field = Field::kLabel, .label = "air", .op = JobTerm::Operator::kHas}}}),
      IsEmpty());
  const auto wrong = Read([](ReadTransaction& t) {
    return t.ListJobs({.terms = {{.field = Field::kState, .value = "SLEEPING"}}});
  });
  EXPECT_EQ(wrong.status(), absl::InvalidArgumentError("filter: \"SLEEPING\" is no job state"));
}

TEST_F(RecordsTest, APageSaysWhetherThereIsANext) {
  for (const char* id : {"a", "b", "c"}) Create(id);
  const auto page = [&](int limit, uint64_t before) {
    return *Read([&](ReadTransaction& t) {
      return t.ListJobs({.before_sequence = before, .limit = limit});
    });
  };
  EXPECT_EQ(page(3, 0).last_sequence, 0u) << "all of them";
  const JobPage first = page(2, 0);
  EXPECT_EQ(first.jobs.size(), 2u);
  EXPECT_EQ(first.total, 3);
  const JobPage second = page(2, first.last_sequence);
  ASSERT_EQ(second.jobs.size(), 1u);
  EXPECT_EQ(second.jobs[0].uid(), "uid-a");
  EXPECT_EQ(second.last_sequence, 0u);
  EXPECT_EQ(second.total, 3);
}

// The first entry of a page always fits, however large.
TEST_F(RecordsTest, APageIsFullByItsBytesToo) {
  for (const char* id : {"a", "b", "c"}) {
    Write([&](WriteTransaction& t) {
      v1::Job job = NewJob(id);
      job.set_state_reason(std::string(kPageBytes * 2 / 3, 'x'));
      return t.CreateJob(&job);
    });
  }
  std::vector<std::string> ids;
  JobQuery query;
  do {
    const auto page = Read([&](ReadTransaction& t) { return t.ListJobs(query); });
    ASSERT_THAT(page->jobs, SizeIs(1));
    EXPECT_EQ(page->total, 3);
    ids.push_back(page->jobs[0].spec().name());
    query.before_sequence = page->last_sequence;
  } while (query.before_sequence != 0);
  EXPECT_THAT(ids, ElementsAre("c", "b", "a"));
}

TEST_F(RecordsTest, UnfinishedJobsAreThoseInNoTerminalState) {
  int number = 0;
  std::vector<std::string> unfinished;
  for (int state = v1::Job::State_MIN; state <= v1::Job::State_MAX; ++state) {
    if (!v1::Job::State_IsValid(state)) continue;
    const std::string id = absl::StrCat("j", ++number);
    Create(id, static_cast<v1::Job::State>(state));
    if (state != v1::Job::CANCELLED && state != v1::Job::SUCCEEDED && state != v1::Job::FAILED) {
      unfinished.push_back(id);
    }
  }
  Write([](WriteTransaction& t) { return t.PutAttempt("j1", v1::Attempt()); });
  std::vector<std::string> listed;
  const auto jobs = Read([](ReadTransaction& t) { return t.ListUnfinishedJobs(); });
  for (const v1::Job& job : *jobs) {
    listed.push_back(job.spec().name());
    EXPECT_EQ(job.attempts_size(), job.spec().name() == "j1" ? 1 : 0);
  }
  EXPECT_EQ(listed, unfinished);
  Create("one-more", v1::Job::RUNNING);
  const auto counts = Read([](ReadTransaction& t) { return t.CountJobs(); });
  for (const auto& [state, count] : *counts) {
    EXPECT_EQ(count, state == v1::Job::RUNNING ? 2 : 1) << state;
  }
}

TEST_F(RecordsTest, AnAttemptIsReplacedByItsNumber) {
  Create("a");
  v1::Attempt attempt;
  for (const auto& [number, token] : {std::pair{1u, 5u}, {2u, 6u}, {1u, 7u}}) {
    attempt.set_number(number);
    attempt.set_fencing_token(token);
    Write([&](WriteTransaction& t) { return t.PutAttempt("a", attempt); });
  }
  const v1::Job job = *Read([](ReadTransaction& t) { return t.GetJob("a"); });
  ASSERT_EQ(job.attempts_size(), 2);
  EXPECT_EQ(job.attempts(0).fencing_token(), 7u);
  EXPECT_EQ(job.attempts(1).fencing_token(), 6u);
}

TEST_F(RecordsTest, EvaluationsComeInTheOrderOfWriting) {
  Create("a");
  const auto put = [&](uint64_t step, double loss) {
    Write([&](WriteTransaction& t) {
      v1::EvalReport eval;
      eval.set_step(step);
      eval.set_loss(loss);
      return t.PutEval("a", eval);
    });
  };
  put(2, 1);
  put(4, 2);
  const EvalPage first = *Read([](ReadTransaction& t) { return t.ListEvals("a", 0, 100); });
  ASSERT_EQ(first.evals.size(), 2u);
  put(2, 3);  // by a later attempt
  const EvalPage next =
      *Read([&](ReadTransaction& t) { return t.ListEvals("a", first.last_sequence, 100); });
  ASSERT_EQ(next.evals.size(), 1u);
  EXPECT_EQ(next.evals[0].loss(), 3);
  EXPECT_GT(next.last_sequence, first.last_sequence);
  const EvalPage none =
      *Read([&](ReadTransaction& t) { return t.ListEvals("a", next.last_sequence, 100); });
  EXPECT_THAT(none.evals, IsEmpty());
  EXPECT_EQ(none.last_sequence, next.last_sequence);
  EXPECT_EQ(Read([](ReadTransaction& t) { return t.ListEvals("a", 0, 100); })->evals.size(), 2u);
}

TEST_F(RecordsTest, CheckpointsComeByStepAndGoByStep) {
  Create("a");
  Create("b");
  const auto put = [&](const char* job, uint64_t step, const char* path) {
    Write([&](WriteTransaction& t) {
      v1::CheckpointNotice checkpoint;
      checkpoint.set_step(step);
      checkpoint.set_path(path);
      return t.PutCheckpoint(job, checkpoint);
    });
  };
  put("a", 4, "late");
  put("a", 2, "early");
  put("a", 4, "late again");
  put("b", 2, "b's");
  const auto paths = [&](const char* job) {
    std::vector<std::string> paths;
    const auto checkpoints = Read([&](ReadTransaction& t) { return t.ListCheckpoints(job); });
    for (const v1::CheckpointNotice& each : *checkpoints) paths.push_back(each.path());
    return paths;
  };
  EXPECT_THAT(paths("a"), ElementsAre("early", "late again"));
  Write([](WriteTransaction& t) { return t.TrimCheckpoints("a", 2); });
  EXPECT_THAT(paths("a"), ElementsAre("early", "late again"));
  Write([](WriteTransaction& t) { return t.TrimCheckpoints("a", 1); });
  EXPECT_THAT(paths("a"), ElementsAre("late again"));
  EXPECT_THAT(paths("b"), ElementsAre("b's"));
}

TEST_F(RecordsTest, CommandsGoToTheirNodeInOrder) {
  Create("a");
  Create("b");
  std::vector<uint64_t> ids;
  const auto put = [&](const char* node, const char* job, uint32_t attempt) {
    Write([&](WriteTransaction& t) {
      v1::Command command;
      command.set_job(job);
      command.set_attempt(attempt);
      const absl::Status status = t.PutCommand(node, &command);
      ids.push_back(command.command_id());
      return status;
    });
  };
  put("n1", "a", 1);
  put("n2", "a", 1);
  put("n1", "b", 1);
  put("n1", "a", 2);
  const auto of = [&](const char* node) {
    std::vector<uint64_t> ids;
    const auto commands = Read([&](ReadTransaction& t) { return t.ListCommands(node); });
    for (const v1::Command& each : *commands) ids.push_back(each.command_id());
    return ids;
  };
  EXPECT_THAT(of("n1"), ElementsAre(ids[0], ids[2], ids[3]));
  EXPECT_THAT(of("n2"), ElementsAre(ids[1]));
  // What an attempt no longer needs goes on all nodes, and nothing else does.
  Write([](WriteTransaction& t) { return t.DeleteCommands("a", 1); });
  EXPECT_THAT(of("n1"), ElementsAre(ids[2], ids[3]));
  EXPECT_THAT(of("n2"), IsEmpty());
  Write([&](WriteTransaction& t) { return t.DeleteCommand(ids[3]); });
  Reopen();
  EXPECT_THAT(of("n1"), ElementsAre(ids[2]));
  put("n1", "a", 3);
  EXPECT_GT(ids[4], ids[3]) << "a number is never used twice";
}

// The order in which jobs were submitted, whatever the clock said.
TEST_F(RecordsTest, JobsAreNumberedAsTheyAreCreated) {
  std::vector<uint64_t> numbers;
  for (const char* id : {"z", "a", "m"}) {
    v1::Job job;
    job.set_name(absl::StrCat("jobs/", id));
    job.mutable_spec()->set_name(id);
    job.set_sequence(77);  // the store's to say
    Write([&](WriteTransaction& t) { return t.CreateJob(&job); });
    numbers.push_back(job.sequence());
    Write([&](WriteTransaction& t) { return t.UpdateJob(&job); });
    EXPECT_EQ(Read([&](ReadTransaction& t) { return t.GetJob(id); })->sequence(), job.sequence());
  }
  EXPECT_LT(numbers[0], numbers[1]);
  EXPECT_LT(numbers[1], numbers[2]);
  std::vector<uint64_t> unfinished;
  for (const v1::Job& job : *Read([](ReadTransaction& t) { return t.ListUnfinishedJobs(); })) {
    unfinished.push_back(job.sequence());
  }
  EXPECT_EQ(unfinished, numbers);
  EXPECT_EQ(Read([](ReadTransaction& t) { return t.ListJobs({}); })->jobs[0].sequence(),
            numbers[2]);
}

TEST_F(RecordsTest, AttemptsGoOneByOne) {
  v1::Job job;
  job.set_name("jobs/a");
  job.mutable_spec()->set_name("a");
  Write([&](WriteTransaction& t) { return t.CreateJob(&job); });
  for (const uint32_t number : {1, 2, 3}) {
    v1::Attempt attempt;
    attempt.set_number(number);
    Write([&](WriteTransaction& t) { return t.PutAttempt("a", attempt); });
  }
  for (int i = 0; i < 2; ++i) {  // the second time there is none
    Write([&](WriteTransaction& t) { return t.DeleteAttempt("a", 2); });
  }
  const v1::Job read = *Read([](ReadTransaction& t) { return t.GetJob("a"); });
  ASSERT_EQ(read.attempts_size(), 2);
  EXPECT_EQ(read.attempts(0).number(), 1u);
  EXPECT_EQ(read.attempts(1).number(), 3u);
}

TEST_F(RecordsTest, CountersAreApart) {
  const auto next = [&](Counter counter) {
    uint64_t value = 0;
    Write([&](WriteTransaction& t) -> absl::Status {
      ASSIGN_OR_RETURN(value, t.Next(counter));
      return absl::OkStatus();
    });
    return value;
  };
  EXPECT_EQ(next(Counter::kFencingToken), 1u);
  EXPECT_EQ(next(Counter::kFencingToken), 2u);
  EXPECT_EQ(next(Counter::kCommandId), 1u);
  EXPECT_EQ(next(Counter::kSessionEpoch), 1u);
  EXPECT_EQ(next(Counter::kFencingToken), 3u);
}

TEST_F(RecordsTest, AWorkersLastEightProcessesAreRemembered) {
  const auto set = [&](const char* node, int process, uint64_t sequence) {
    Write([&](WriteTransaction& t) {
      return t.SetAppliedSequence(node, absl::StrCat("process-", process), sequence);
    });
  };
  const auto applied = [&](const char* node, int process) {
    return *Read([&](ReadTransaction& t) {
      return t.GetAppliedSequence(node, absl::StrCat("process-", process));
    });
  };
  set("other", 0, 50);
  for (int process = 0; process < 8; ++process) set("n", process, 10 + process);
  EXPECT_EQ(applied("n", 0), 10u);
  set("n", 0, 20);  // heard of again: now the newest
  set("n", 8, 18);
  EXPECT_EQ(applied("n", 0), 20u);
  EXPECT_EQ(applied("n", 1), 0u) << "the one that was silent for longest";
  EXPECT_EQ(applied("n", 2), 12u);
  EXPECT_EQ(applied("other", 0), 50u);
}

TEST_F(RecordsTest, RepliesAreKeptForADay) {
  const RequestKey key{.id = "r", .method = "CreateJob", .fingerprint = "f"};
  const auto put = [&](const RequestKey& each, const char* reply) {
    Write([&](WriteTransaction& t) { return t.PutReply(each, reply); });
  };
  const auto find = [&] { return *Read([&](ReadTransaction& t) { return t.FindReply(key); }); };
  EXPECT_EQ(find(), std::nullopt);
  put(key, "the reply");
  clock_.Advance(kReplyLifetime);
  put({.id = "later"}, "");
  EXPECT_EQ(find(), "the reply");
  clock_.Advance(absl::Microseconds(1));
  put({.id = "last"}, "");
  EXPECT_EQ(find(), std::nullopt);
  EXPECT_EQ(kReplyLifetime, absl::Hours(24));
}

// Their day is one in which the coordinator runs, whatever its clock says at a start.
TEST_F(RecordsTest, AClockThatLeapsBetweenStartsAgesNoReplies) {
  const auto put = [&](const std::string& id) {
    Write([&](WriteTransaction& t) { return t.PutReply({.id = id}, id); });
  };
  const auto kept = [&](const std::string& id) {
    return Read([&](ReadTransaction& t) { return t.FindReply({.id = id}); })->has_value();
  };
  for (const int days : {400, -800, 0}) {
    clock_.Advance(absl::Hours(1));
    put(absl::StrCat("before ", days));
    store_.reset();
    clock_.Advance(absl::Hours(24 * days));
    Reopen();
    put(absl::StrCat("after ", days));
    EXPECT_TRUE(kept(absl::StrCat("before ", days)));
    EXPECT_TRUE(kept("before 400"));
  }
  // A day later they go, and those of a clock that was ahead with them.
  clock_.Advance(kReplyLifetime - absl::Hours(1));
  put("much later");
  for (const char* gone : {"before 400", "after 400"}) EXPECT_FALSE(kept(gone)) << gone;
  for (const char* there : {"before 0", "after 0"}) EXPECT_TRUE(kept(there)) << there;
}

TEST_F(RecordsTest, WithoutAnIdAndAfterAFailureARequestIsDoneAgain) {
  int runs = 0;
  const auto run = [&](const RequestKey& key, const absl::Status& outcome) {
    return store_->Write([&](WriteTransaction& t) {
      return Once<v1::Job>(t, key,
                           [&]() -> absl::StatusOr<v1::Job> {
                             ++runs;
                             if (!outcome.ok()) return outcome;
                             return v1::Job();
                           })
          .status();
    });
  };
  EXPECT_TRUE(run({}, absl::OkStatus()).ok());
  EXPECT_TRUE(run({}, absl::OkStatus()).ok());
  EXPECT_EQ(runs, 2);
  const RequestKey key{.id = "r", .method = "m"};
  EXPECT_EQ(run(key, absl::AbortedError("no")), absl::AbortedError("no"));
  EXPECT_TRUE(run(key, absl::OkStatus()).ok());
  EXPECT_EQ(runs, 4);
  EXPECT_TRUE(run(key, absl::OkStatus()).ok());
  EXPECT_EQ(runs, 4);
}

TEST_F(RecordsTest, NodesComeById) {
  for (const char* name : {"nodes/b", "nodes/a", "nodes/b"}) {
    v1::Node node;
    node.set_name(name);
    Write([&](WriteTransaction& t) { return t.PutNode(node); });
  }
  v1::Node wrong;
  wrong.set_name("jobs/a");
  EXPECT_EQ(Refusal([&](WriteTransaction& t) { return t.PutNode(wrong); }),
            absl::StatusCode::kInvalidArgument);
  const std::vector<v1::Node> nodes = *Read([](ReadTransaction& t) { return t.ListNodes(); });
  ASSERT_EQ(nodes.size(), 2u);
  EXPECT_EQ(nodes[0].name(), "nodes/a");
}

TEST_F(RecordsTest, ATokensTextIsOneTokens) {
  StoredToken token;
  token.token.set_name("tokens/a");
  token.sha256 = std::string(32, 'x');
  token.token.mutable_expire_time()->set_seconds(absl::ToUnixSeconds(clock_.Now()) + 60);
  Write([&](WriteTransaction& t) { return t.CreateToken(token); });
  token.token.set_name("tokens/b");
  EXPECT_EQ(Refusal([&](WriteTransaction& t) { return t.CreateToken(token); }),
            absl::StatusCode::kAlreadyExists);
}

TEST(SealTest, WhatWasChangedOrCutIsFound) {
  const std::string sealed = Seal("payload");
  EXPECT_EQ(Unseal(sealed).value(), "payload");
  EXPECT_EQ(Unseal(Seal("")).value(), "");
  for (size_t i = 0; i < sealed.size(); ++i) {
    std::string damaged = sealed;
    damaged[i] ^= 1;
    EXPECT_FALSE(Unseal(damaged).ok()) << i;
    EXPECT_FALSE(Unseal(sealed.substr(0, i)).ok()) << i;
  }
}

TEST(ExplainTest, TellsTheFileWhatHappenedAndWhatToDo) {
  struct Case {
    int code;
    absl::StatusCode expected;
    const char* remedy;
  };
  for (const Case& each :
       {Case{SQLITE_FULL, absl::StatusCode::kResourceExhausted, "free space"},
        Case{SQLITE_READONLY, absl::StatusCode::kFailedPrecondition, "writable"},
        Case{SQLITE_PERM, absl::StatusCode::kFailedPrecondition, "writable"},
        Case{SQLITE_CANTOPEN, absl::StatusCode::kFailedPrecondition, "folder exists"},
        Case{SQLITE_CORRUPT, absl::StatusCode::kDataLoss, "restore it from a backup"},
        Case{SQLITE_NOTADB, absl::StatusCode::kDataLoss, "restore it from a backup"},
        Case{SQLITE_BUSY, absl::StatusCode::kUnavailable, "end that program"},
        Case{SQLITE_LOCKED, absl::StatusCode::kUnavailable, "end that program"},
        Case{SQLITE_IOERR, absl::StatusCode::kUnavailable, "file system"},
        Case{SQLITE_MISMATCH, absl::StatusCode::kInternal, "report this"}}) {
    const absl::Status status =
        Connection::Explain("/data/x.db", SQLite::Exception("what SQLite says", each.code));
    EXPECT_EQ(status.code(), each.expected) << each.code;
    EXPECT_THAT(std::string(status.message()),
                ::testing::AllOf(HasSubstr("/data/x.db"), HasSubstr("what SQLite says"),
                                 HasSubstr(each.remedy)));
  }
}

}  // namespace
}  // namespace ringleader::store
