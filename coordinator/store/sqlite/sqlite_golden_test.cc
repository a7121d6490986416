// Databases that earlier schemas wrote must be read by every later release. With
// RINGLEADER_WRITE_GOLDEN=1 in the environment the test of the newest schema writes its file in
// tests/golden/database/ instead, once: when the schema is new.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "base/status_macros.h"
#include "base/testing/fake_clock.h"
#include "base/testing/temp_dir.h"
#include "coordinator/store/sqlite/sqlite_connection.h"
#include "coordinator/store/sqlite/sqlite_store.h"

namespace ringleader::store {
namespace {

namespace fs = std::filesystem;

constexpr char kSchema1[] = "tests/golden/database/schema-1.db";
constexpr char kSchema2[] = "tests/golden/database/schema-2.db";
constexpr char kSchema3[] = "tests/golden/database/schema-3.db";

absl::Status Fill(WriteTransaction& t) {
  v1::Job job;
  job.set_name("jobs/golden");
  job.set_uid("0123");
  job.set_state(v1::Job::RUNNING);
  job.set_owner("alice");
  job.set_project("ocean");
  job.mutable_spec()->set_name("golden");
  (*job.mutable_spec()->mutable_labels())["team"] = "ocean";
  RETURN_IF_ERROR(t.CreateJob(&job));
  v1::Attempt attempt;
  attempt.set_number(1);
  ASSIGN_OR_RETURN(const uint64_t token, t.Next(Counter::kFencingToken));
  attempt.set_fencing_token(token);
  RETURN_IF_ERROR(t.PutAttempt("golden", attempt));
  v1::StepReport step;
  step.set_step(1);
  step.set_loss(5.5);
  RETURN_IF_ERROR(t.PutStep("golden", step));
  v1::EvalReport eval;
  eval.set_step(1);
  eval.set_loss(5.25);
  RETURN_IF_ERROR(t.PutEval("golden", eval));
  v1::CheckpointNotice checkpoint;
  checkpoint.set_step(1);
  checkpoint.set_path("/checkpoints/step-0000000001");
  RETURN_IF_ERROR(t.PutCheckpoint("golden", checkpoint));
  v1::LogLine line;
  line.set_text("step 1");
  RETURN_IF_ERROR(t.AppendLogs("golden", 1, {line}));
  v1::Command command;
  command.set_job("golden");
  command.set_attempt(1);
  command.mutable_connect()->add_addresses("127.0.0.1:1");
  RETURN_IF_ERROR(t.PutCommand("n1", &command));
  RETURN_IF_ERROR(t.SetAppliedSequence("n1", "i1", 7));
  v1::Node node;
  node.set_name("nodes/n1");
  node.set_state(v1::Node::DRAINING);
  RETURN_IF_ERROR(t.PutNode(node));
  StoredToken bearer;
  bearer.token.set_name("tokens/0123456789ab");
  bearer.token.set_role(v1::VIEWER);
  bearer.token.mutable_expire_time()->set_seconds(int64_t{1} << 33);
  bearer.sha256 = std::string(32, '\x7f');
  RETURN_IF_ERROR(t.CreateToken(bearer));
  v1::StepPlan plan;
  plan.set_version(3);
  plan.set_stripe(128);
  RETURN_IF_ERROR(t.PutPlan("golden", plan));
  v1::Measurements measured;
  v1::MachineKind* const machine = measured.mutable_layers()->mutable_machine();
  machine->set_device("NVIDIA H200");
  measured.mutable_layers()->mutable_shape()->set_pattern("dense");
  measured.mutable_layers()->add_rows()->set_p50_ms(12.5);
  *measured.add_links()->mutable_machine() = *machine;
  measured.mutable_links(0)->set_bytes_per_second(1.2e11);
  RETURN_IF_ERROR(t.PutMeasurements(measured));
  v1::AuditRecord record;
  record.set_caller("alice");
  record.set_method("JobService.CreateJob");
  RETURN_IF_ERROR(t.AppendAudit(record));
  return t.PutReply({.id = "request-1", .method = "CreateJob", .fingerprint = "f"},
                    job.SerializeAsString());
}

// Everything that schema 1 holds.
void ExpectFilled(Store& store) {
  const absl::Status status = store.Write([](WriteTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(const v1::Job job, t.GetJob("golden"));
    EXPECT_EQ(job.uid(), "0123");
    EXPECT_EQ(job.state(), v1::Job::RUNNING);
    EXPECT_EQ(job.revision(), 1u);
    EXPECT_EQ(job.attempts(0).fencing_token(), 1u);
    ASSIGN_OR_RETURN(
        const JobPage page,
        t.ListJobs(
            {.terms = {{.field = JobTerm::Field::kLabel, .label = "team", .value = "ocean"}}}));
    EXPECT_EQ(page.total, 1);
    ASSIGN_OR_RETURN(const StepPage steps, t.ListSteps("golden", 0, 0, 10));
    EXPECT_EQ(steps.steps.at(0).loss(), 5.5);
    ASSIGN_OR_RETURN(const EvalPage evals, t.ListEvals("golden", 0, 100));
    EXPECT_EQ(evals.evals.at(0).loss(), 5.25);
    ASSIGN_OR_RETURN(const auto checkpoints, t.ListCheckpoints("golden"));
    EXPECT_EQ(checkpoints.at(0).path(), "/checkpoints/step-0000000001");
    ASSIGN_OR_RETURN(const LogPage logs, t.ReadLogs({.job = "golden"}));
    EXPECT_EQ(logs.lines.at(0).text(), "step 1");
    ASSIGN_OR_RETURN(const auto commands, t.ListCommands("n1"));
    EXPECT_EQ(commands.at(0).connect().addresses(0), "127.0.0.1:1");
    ASSIGN_OR_RETURN(const uint64_t applied, t.GetAppliedSequence("n1", "i1"));
    EXPECT_EQ(applied, 7u);
    ASSIGN_OR_RETURN(const auto nodes, t.ListNodes());
    EXPECT_EQ(nodes.at(0).name(), "nodes/n1");
    EXPECT_EQ(nodes.at(0).state(), v1::Node::DRAINING);
    ASSIGN_OR_RETURN(const auto reply,
                     t.FindReply({.id = "request-1", .method = "CreateJob", .fingerprint = "f"}));
    EXPECT_TRUE(reply.has_value());
    ASSIGN_OR_RETURN(const uint64_t token, t.Next(Counter::kFencingToken));
    EXPECT_EQ(token, 2u);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

class GoldenDatabaseTest : public ::testing::Test {
 protected:
  std::unique_ptr<Store> OpenCopy(const char* golden) {
    const std::string path = dir_.File("ringleader.db");
    fs::copy_file(golden, path);
    auto store = OpenSqliteStore({.path = path, .clock = &clock_});
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }

  FakeClock clock_;
  const TempDir dir_;
};

TEST_F(GoldenDatabaseTest, SchemaOneIsRead) {
  const std::unique_ptr<Store> store = OpenCopy(kSchema1);
  ASSERT_NE(store, nullptr);
  ExpectFilled(*store);
  const absl::Status status = store->Read([](ReadTransaction& t) -> absl::Status {
    // Nobody's: an admin's to change.
    ASSIGN_OR_RETURN(const v1::Job job, t.GetJob("golden"));
    EXPECT_EQ(job.owner(), "");
    ASSIGN_OR_RETURN(const JobPage page,
                     t.ListJobs({.terms = {{.field = JobTerm::Field::kOwner, .value = ""}}}));
    EXPECT_EQ(page.total, 1);
    ASSIGN_OR_RETURN(const AuditPage audit, t.ListAudit({}));
    EXPECT_TRUE(audit.records.empty());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(GoldenDatabaseTest, SchemaTwoIsRead) {
  const std::unique_ptr<Store> store = OpenCopy(kSchema2);
  ASSERT_NE(store, nullptr);
  ExpectFilled(*store);
  const absl::Status status = store->Read([](ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(
        const JobPage page,
        t.ListJobs({.terms = {{.field = JobTerm::Field::kOwner, .value = "alice"},
                              {.field = JobTerm::Field::kProject, .value = "ocean"}}}));
    EXPECT_EQ(page.total, 1);
    ASSIGN_OR_RETURN(const std::vector<StoredToken> tokens, t.ListTokens());
    EXPECT_EQ(tokens.at(0).token.role(), v1::VIEWER);
    EXPECT_EQ(tokens.at(0).sha256, std::string(32, '\x7f'));
    ASSIGN_OR_RETURN(const AuditPage audit, t.ListAudit({.caller = "alice"}));
    EXPECT_EQ(audit.records.at(0).method(), "JobService.CreateJob");
    EXPECT_EQ(audit.records.at(0).sequence(), 1u);
    ASSIGN_OR_RETURN(const std::optional<v1::StepPlan> plan, t.GetPlan("golden"));
    EXPECT_FALSE(plan.has_value());
    ASSIGN_OR_RETURN(const MeasurementList list, t.ListMeasurements());
    EXPECT_TRUE(list.tables.empty());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(GoldenDatabaseTest, SchemaThreeIsRead) {
  if (std::getenv("RINGLEADER_WRITE_GOLDEN") != nullptr) {
    fs::remove(kSchema3);
    auto store = OpenSqliteStore({.path = kSchema3, .clock = &clock_});
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_TRUE((*store)->Write(Fill).ok());
    store->reset();
    fs::remove(std::string(kSchema3) + ".lock");
    GTEST_SKIP() << "wrote " << kSchema3;
  }
  const std::unique_ptr<Store> store = OpenCopy(kSchema3);
  ASSERT_NE(store, nullptr);
  ExpectFilled(*store);
  const absl::Status status = store->Read([](ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(const std::optional<v1::StepPlan> plan, t.GetPlan("golden"));
    EXPECT_EQ(plan.value().version(), 3u);
    EXPECT_EQ(plan->stripe(), 128u);
    ASSIGN_OR_RETURN(const MeasurementList list, t.ListMeasurements());
    EXPECT_TRUE(list.damaged.empty());
    EXPECT_EQ(list.tables.at(0).machine().device(), "NVIDIA H200");
    EXPECT_EQ(list.tables.at(0).rows(0).p50_ms(), 12.5);
    EXPECT_EQ(list.links.at(0).bytes_per_second(), 1.2e11);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace ringleader::store
