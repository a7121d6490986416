// ringctl whole, against a coordinator in this process: what a user types, and what he then reads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "base/net/token.h"
#include "cli/app.h"
#include "cli/client.h"
#include "cli/follow.h"
#include "cli/printer.h"
#include "cli/testing/fake_coordinator.h"

namespace ringleader::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

struct Result {
  int code;
  std::string out;
  std::string err;
};

class CliTest : public ::testing::Test {
 protected:
  CliTest()
      : folder_(std::filesystem::path(::testing::TempDir()) / ("cli_" + std::to_string(getpid()))),
        clock_(absl::FromUnixSeconds(1'000'000)) {
    std::filesystem::create_directories(folder_ / "tokens");
    Write("tokens/manifest.json", "{}");
    Write("config.json", R"({"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256,
        "intermediate_size": 688, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320})");
    Write("job.yaml", R"(
name: tiny
model: {config: config.json}
data: {train: tokens, sequence_length: 16384}
parallelism: {context: 4}
training: {steps: 3}
checkpoint: {directory: checkpoints}
resources: {trainers: 4}
)");
  }
  ~CliTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
  }
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }

  Result Run(const std::vector<std::string>& arguments, bool is_terminal = false) {
    std::ostringstream out, err;
    Context context{.out = out,
                    .err = err,
                    .is_terminal = is_terminal,
                    .clock = &clock_,
                    .environment = [this](const char* name) -> std::optional<std::string> {
                      const auto found = environment_.find(name);
                      if (found == environment_.end()) return std::nullopt;
                      return found->second;
                    }};
    context.retry.first_delay = absl::Milliseconds(5);
    context.retry.longest_delay = absl::Milliseconds(50);
    const int code = RunRingctl(arguments, std::move(context));
    return {code, out.str(), err.str()};
  }

  v1::Job& AddJob(const std::string& id, v1::Job::State state) {
    v1::Job& job = coordinator_.jobs["jobs/" + id];
    job.set_name("jobs/" + id);
    job.set_state(state);
    job.set_revision(1);
    job.mutable_progress()->set_total_steps(3);
    job.mutable_create_time()->set_seconds(1'000'000 - 300);
    return job;
  }

  // A run of three steps: a script for WatchJob that ends in `last`.
  void ScriptRun(const std::string& id, v1::Job::State last) {
    v1::Job job = AddJob(id, v1::Job::PENDING);
    const auto add_job = [&](v1::Job::State state, uint64_t revision) {
      job.set_state(state);
      job.set_revision(revision);
      *coordinator_.watch.emplace_back().mutable_job() = job;
    };
    add_job(v1::Job::PENDING, 1);
    add_job(v1::Job::RUNNING, 2);
    for (uint64_t step = 1; step <= 3; ++step) {
      v1::StepReport* report = coordinator_.watch.emplace_back().add_steps();
      report->set_step(step);
      report->set_loss(6.0 - static_cast<double>(step));
      report->set_tokens(16384);
      report->set_step_seconds(2);
      report->set_worker_imbalance(1.01);
      report->set_step_imbalance(1.1);
      report->mutable_phases()->set_linear(0.5);
      report->mutable_phases()->set_exposed_offload(0.25);
      for (int l = 0; l < 2; ++l) {
        report->add_layers()->set_layer(l);
        report->mutable_layers(l)->set_density(l == 0 ? 1.0 : 0.2);
      }
    }
    v1::EvalReport* eval = coordinator_.watch.emplace_back().add_evals();
    eval->set_step(3);
    eval->set_loss(2.5);
    eval->set_seconds(1);
    job.mutable_progress()->set_step(3);
    job.mutable_first_eval()->set_loss(5);
    *job.mutable_last_eval() = *eval;
    if (last == v1::Job::FAILED) job.set_state_reason("rank 2 on b: out of memory");
    add_job(last, 3);
    coordinator_.jobs[job.name()] = job;
  }

  FakeCoordinator coordinator_;
  std::filesystem::path folder_;
  FakeClock clock_;
  std::map<std::string, std::string> environment_ = {{"RINGLEADER_ADDRESS", coordinator_.address()},
                                                     {"HOME", "/nonexistent"}};
};

TEST_F(CliTest, ListShowsARowAJob) {
  AddJob("waits", v1::Job::PENDING).set_state_reason("needs 16 trainers; 9 free on 3 nodes");
  v1::Job& job = AddJob("runs", v1::Job::RUNNING);
  job.mutable_progress()->set_step(2);
  job.mutable_progress()->set_loss(3.25);
  job.mutable_progress()->set_tokens_per_second(12345);
  job.mutable_progress()->set_eta_seconds(80);
  AddJob("zzz", v1::Job::SUCCEEDED);
  const Result result = Run({"list"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out,
            "NAME   STATE      STEP  LOSS    TOKENS/S  ETA    AGE  REASON\n"
            "runs   RUNNING    2/3   3.2500  12,345    1m20s  5m   -\n"
            "waits  PENDING    0/3   -       -         -      5m   needs 16 trainers; 9 free on 3 "
            "nodes\n"
            "zzz    SUCCEEDED  0/3   -       -         -      5m   -\n");
}

TEST_F(CliTest, ListShowsOwnersWhereThereAreSomeAndFiltersByThem) {
  v1::Job& job = AddJob("a", v1::Job::PENDING);
  job.set_owner("alice@example.org");
  job.set_project("ocean");
  AddJob("b", v1::Job::PENDING);
  const Result result = Run(
      {"list", "--owner", "alice@example.org", "--project", "ocean", "--filter", "state=PENDING"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out,
            "NAME  OWNER              PROJECT  STATE    STEP  LOSS  TOKENS/S  ETA  AGE  REASON\n"
            "a     alice@example.org  ocean    PENDING  0/3   -     -         -    5m   -\n"
            "b     -                  -        PENDING  0/3   -     -         -    5m   -\n");
  EXPECT_EQ(coordinator_.filters.at(0),
            "state=PENDING AND owner=\"alice@example.org\" AND project=\"ocean\"");
  EXPECT_THAT(Run({"get", "a"}).out, HasSubstr("owner    alice@example.org"));
  Run({"list", "--owner", "a\" OR \"b"});
  EXPECT_EQ(coordinator_.filters.back(), R"(owner="a\" OR \"b")");
}

TEST_F(CliTest, TokensAreMadeHereShownOnceAndRevoked) {
  const Result made = Run({"token", "create", "--user", "dave", "--role", "viewer", "--days", "7"});
  EXPECT_EQ(made.code, 0) << made.err;
  EXPECT_THAT(made.out, ::testing::MatchesRegex("rlt_[A-Za-z0-9_-]{43}\n"));
  const v1::CreateTokenRequest& request = coordinator_.token_requests.at(0);
  EXPECT_EQ(request.sha256(), TokenHash(made.out.substr(0, made.out.size() - 1)));
  EXPECT_EQ(request.role(), v1::VIEWER);
  EXPECT_EQ(request.lifetime_seconds(), 7u * 24 * 3600);
  EXPECT_THAT(made.err, HasSubstr("this is 1, of dave"));
  EXPECT_NE(Run({"token", "create", "--user", "dave"}).out, made.out);
  EXPECT_THAT(Run({"token", "list"}).out, HasSubstr("1      dave  -        viewer"));
  EXPECT_EQ(Run({"token", "revoke", "1"}).out, "1, of dave, is revoked\n");
  EXPECT_EQ(Run({"token", "revoke", "tokens/1"}).code, kNotFound);
  EXPECT_EQ(Run({"token", "create", "--user", "a", "--role", "node"}).code, kUsage);
  EXPECT_EQ(Run({"token", "create", "--user", "a", "--days", "400"}).code, kUsage);
  EXPECT_EQ(Run({"token"}).code, kUsage);
}

TEST_F(CliTest, ATokenIsReadFromAFileAndNotSentInPlainText) {
  Write("token", " rlt_abc\n");
  const Result plain = Run({"list", "--token-file", Path("token")});
  EXPECT_EQ(plain.code, kConflict);
  EXPECT_THAT(plain.err, HasSubstr("is not sent to"));
  EXPECT_TRUE(coordinator_.filters.empty());
  environment_["RINGLEADER_TOKEN"] = "two words";
  EXPECT_THAT(Run({"list"}).err, HasSubstr("RINGLEADER_TOKEN holds no token"));
  EXPECT_THAT(Run({"list", "--token-file", Path("token")}).err, HasSubstr("is not sent to"));
  environment_.erase("RINGLEADER_TOKEN");
  EXPECT_THAT(Run({"list", "--token-file", Path("absent")}).err, HasSubstr("cannot read"));
  Write("settings.yaml", "token_file: " + Path("token") + "\n");
  EXPECT_THAT(Run({"list", "--config", Path("settings.yaml")}).err, HasSubstr("is not sent to"));
  for (const std::string& garbled : {std::string(), std::string("a\x01"), std::string(600, 'x')}) {
    Write("token", garbled);
    EXPECT_EQ(Run({"list", "--token-file", Path("token")}).code, kUsage);
  }
}

TEST_F(CliTest, AuditShowsPagesAndFilters) {
  for (int i = 0; i < 5; ++i) {
    v1::AuditRecord& record = coordinator_.audit.emplace_back();
    record.set_caller("alice");
    record.set_method("JobService.CreateJob");
    record.set_resource("jobs/j" + std::to_string(i));
    record.set_outcome("OK");
    record.mutable_time()->set_seconds(1'000'000);
  }
  const Result all = Run({"audit"});
  EXPECT_EQ(all.code, 0) << all.err;
  EXPECT_THAT(all.out, HasSubstr("1970-01-12 13:46:40  alice"));
  EXPECT_THAT(all.out, HasSubstr("jobs/j4"));
  const Result some = Run({"audit", "--limit", "3", "--who", "alice", "--method", "CreateJob",
                           "--resource", "jobs/a", "--outcome", "OK", "--since", "1h"});
  EXPECT_THAT(some.out, Not(HasSubstr("jobs/j3")));
  EXPECT_THAT(some.err, HasSubstr("there are more"));
  const v1::ListAuditRecordsRequest& request = coordinator_.audit_requests.back();
  EXPECT_EQ(request.caller(), "alice");
  EXPECT_EQ(request.method(), "CreateJob");
  EXPECT_EQ(request.resource(), "jobs/a");
  EXPECT_EQ(request.outcome(), "OK");
  EXPECT_EQ(request.after_time().seconds(), 1'000'000 - 3600);
  EXPECT_EQ(Run({"audit", "--until", "1970-01-12T00:00:00Z"}).code, 0);
  EXPECT_EQ(coordinator_.audit_requests.back().before_time().seconds(), 950'400);
  EXPECT_EQ(Run({"audit", "--since", "yesterday"}).code, kUsage);
}

TEST_F(CliTest, AnEmptyListIsAList) {
  EXPECT_EQ(Run({"list", "-o", "json"}).out, "{\n  \"jobs\": []\n}\n");
  EXPECT_EQ(Run({"nodes", "-o", "yaml"}).out, "nodes:\n  []\n");
}

TEST_F(CliTest, ListSaysWhatItLeftOut) {
  for (const char* id : {"a", "b", "c"}) AddJob(id, v1::Job::PENDING);
  const Result result = Run({"list", "--limit", "1"});
  EXPECT_THAT(result.out, Not(HasSubstr("b  ")));
  EXPECT_THAT(result.err, HasSubstr("1 of 3 jobs"));
}

TEST_F(CliTest, GetInThreeFormats) {
  v1::Job& job = AddJob("tiny", v1::Job::FAILED);
  job.set_state_reason("out of retries");
  job.mutable_spec()->set_name("tiny");
  job.mutable_spec()->mutable_attention()->set_pattern(v1::AttentionSpec::VERTICAL_SLASH);
  v1::Attempt* attempt = job.add_attempts();
  attempt->set_number(1);
  attempt->set_state(v1::Attempt::FAILED);
  attempt->set_last_step(2);
  attempt->add_placements()->set_node("nodes/b");
  attempt->mutable_placements(0)->set_trainers(4);
  attempt->mutable_failure()->set_rank(2);
  attempt->mutable_failure()->set_node("nodes/b");
  attempt->mutable_failure()->set_message("out of memory");
  EXPECT_EQ(Run({"get", "tiny"}).out,
            "name    tiny\n"
            "state   FAILED\n"
            "reason  out of retries\n"
            "age     5m\n"
            "steps   0/3\n"
            "\n"
            "ATTEMPT  STATE   STEPS  NODES  REASON\n"
            "1        FAILED  0..2   b×4    rank 2 on b: out of memory\n");
  const auto json = nlohmann::json::parse(Run({"get", "jobs/tiny", "-o", "json"}).out);
  EXPECT_EQ(json["state"], "FAILED");
  EXPECT_EQ(json["attempts"][0]["failure"]["rank"], 2);
  const std::string yaml = Run({"get", "tiny", "-o", "yaml"}).out;
  EXPECT_THAT(yaml, HasSubstr("state: FAILED"));
  EXPECT_THAT(yaml, HasSubstr("pattern: vertical_slash"));  // as in a job file
}

TEST_F(CliTest, SubmitCreatesTheJob) {
  const Result result = Run({"submit", Path("job.yaml"), "--set", "training.steps=7"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, "tiny is PENDING; follow it with: ringctl watch tiny\n");
  const v1::JobSpec& spec = coordinator_.jobs["jobs/tiny"].spec();
  EXPECT_EQ(spec.training().steps(), 7);
  EXPECT_EQ(spec.data().train(), Path("tokens"));
  EXPECT_EQ(coordinator_.request_ids.at(0).size(), 36);
  const Result before =
      Run({"submit", "--set", "training.steps=8", "--set", "name=two", Path("job.yaml")});
  EXPECT_EQ(before.code, 0) << before.err;
  EXPECT_EQ(coordinator_.jobs["jobs/two"].spec().training().steps(), 8);
}

TEST_F(CliTest, SubmitComplainsBeforeItAsksAnyone) {
  coordinator_.Stop();
  const Result range = Run({"submit", Path("job.yaml"), "--set", "attention.vertical_mass=2"});
  EXPECT_EQ(range.code, kUsage);
  EXPECT_THAT(range.err, HasSubstr("attention.vertical_mass: 2 is out of range"));
  const Result name = Run({"submit", Path("job.yaml"), "--set", "atention.tile=64"});
  EXPECT_THAT(name.err, HasSubstr("did you mean attention.tile?"));
  const Result file = Run({"submit", Path("none.yaml")});
  EXPECT_EQ(file.code, kNotFound);
  std::filesystem::remove(folder_ / "tokens/manifest.json");
  const Result shards = Run({"submit", Path("job.yaml")});
  EXPECT_EQ(shards.code, kNotFound);
  EXPECT_THAT(shards.err, HasSubstr("data.train"));
}

// Each lost reply makes ringctl ask again; the coordinator knows the request by its id.
TEST_F(CliTest, SubmitsOnceThoughRepliesAreLost) {
  coordinator_.lose_replies = 3;
  const Result result = Run({"submit", Path("job.yaml")});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(coordinator_.created, 1);
  ASSERT_EQ(coordinator_.request_ids.size(), 4);
  for (const std::string& id : coordinator_.request_ids) {
    EXPECT_EQ(id, coordinator_.request_ids[0]);
  }
  EXPECT_THAT(result.err, HasSubstr("is away"));
  EXPECT_THAT(result.err, HasSubstr("is back"));
}

TEST_F(CliTest, SubmitOutlastsARestartOfTheCoordinator) {
  coordinator_.Stop();
  std::ostringstream out, err;
  Result result;
  std::thread user([&] { result = Run({"submit", Path("job.yaml")}); });
  coordinator_.Start();
  user.join();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(coordinator_.created, 1);
}

TEST_F(CliTest, NobodyAnswers) {
  coordinator_.Stop();
  const Result result = Run({"list", "--retry-for", "0"});
  EXPECT_EQ(result.code, kUnavailable);
  EXPECT_THAT(result.err, StartsWith("ringctl: no coordinator answers at 127.0.0.1:"));
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1);
}

TEST_F(CliTest, DryRunShowsDefaultsAndPlan) {
  coordinator_.validation.mutable_plan()->set_layout(v1::ParallelismSpec::STRIPED);
  coordinator_.validation.mutable_plan()->set_stripe(64);
  coordinator_.validation.mutable_plan()->mutable_ring()->set_kind(v1::ParallelismSpec::FLAT);
  coordinator_.validation.set_pending_reason("needs 4 trainers; 2 free on 1 node");
  const Result result = Run({"submit", Path("job.yaml"), "--dry-run"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("sequence_length: 16384"));
  EXPECT_THAT(result.out, HasSubstr("layout  striped, stripes of 64 tokens"));
  EXPECT_THAT(result.out, HasSubstr("would wait: needs 4 trainers"));
  EXPECT_EQ(coordinator_.created, 0);
}

TEST_F(CliTest, FollowPrintsALineAStep) {
  ScriptRun("other", v1::Job::SUCCEEDED);
  const Result result = Run({"watch", "other"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("other is SUCCEEDED\n"));

  coordinator_.watch.clear();
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  coordinator_.jobs.erase("jobs/tiny");
  const Result follow = Run({"submit", Path("job.yaml"), "--follow"});
  EXPECT_EQ(follow.code, 0) << follow.err;
  EXPECT_EQ(follow.out,
            "tiny is PENDING\n"
            "tiny is RUNNING\n"
            "step 1/3  loss 5.0000  tokens/s 8192  seconds 2.00  density 0.600  imbalance 1.010  "
            "eta 4s\n"
            "step 2/3  loss 4.0000  tokens/s 8192  seconds 2.00  density 0.600  imbalance 1.010  "
            "eta 2s\n"
            "step 3/3  loss 3.0000  tokens/s 8192  seconds 2.00  density 0.600  imbalance 1.010  "
            "eta 0s\n"
            "held-out loss 2.5000 after step 3 (1.0 s)\n"
            "tiny is SUCCEEDED\n");
}

TEST_F(CliTest, FollowingEndsWithTheJobsResult) {
  ScriptRun("bad", v1::Job::FAILED);
  const Result failed = Run({"watch", "bad"});
  EXPECT_EQ(failed.code, kJobFailed);
  EXPECT_THAT(failed.out, HasSubstr("bad is FAILED: rank 2 on b: out of memory"));
  coordinator_.watch.clear();
  ScriptRun("gone", v1::Job::CANCELLED);
  EXPECT_EQ(Run({"watch", "gone"}).code, kJobCancelled);
}

TEST_F(CliTest, ATerminalGetsABar) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  coordinator_.jobs["jobs/tiny"].mutable_progress()->set_step(0);
  const Result result = Run({"watch", "tiny"}, /*is_terminal=*/true);
  EXPECT_THAT(result.out, HasSubstr("\r\033[K[########----------------] 1/3  loss 5.0000  8,192 "
                                    "tokens/s  ETA 4s  imbalance 1.010"));
  EXPECT_THAT(result.out, HasSubstr("[########################] 3/3"));
}

TEST_F(CliTest, ASkippedStepStaysInSight) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  coordinator_.jobs["jobs/tiny"].mutable_progress()->set_step(0);
  for (v1::WatchJobResponse& response : coordinator_.watch) {
    for (v1::StepReport& step : *response.mutable_steps()) step.set_skipped(step.step() == 2);
  }
  EXPECT_THAT(Run({"watch", "tiny"}, /*is_terminal=*/true).out,
              HasSubstr("\nstep 2  skipped: gradient was not finite\n"));
  EXPECT_THAT(Run({"watch", "tiny"}).out, HasSubstr("eta 2s  skipped: gradient was not finite\n"));
}

// The stream breaks twice; what was shown is not shown again, and nothing is left out.
TEST_F(CliTest, FollowingResumesBehindWhatItHasSeen) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  coordinator_.jobs["jobs/tiny"].mutable_progress()->set_step(0);
  const std::string undisturbed = Run({"watch", "tiny"}).out;
  coordinator_.watch_requests.clear();
  coordinator_.break_streams_after = {3, 0, 2};
  const Result result = Run({"watch", "tiny"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, undisturbed);
  ASSERT_EQ(coordinator_.watch_requests.size(), 4);
  EXPECT_EQ(coordinator_.watch_requests[1].after_revision(), 2);
  EXPECT_EQ(coordinator_.watch_requests[1].after_step(), 1);
  EXPECT_EQ(coordinator_.watch_requests[3].after_step(), 3);
}

// The job was deleted, and its name given to another, while the coordinator was away.
TEST_F(CliTest, FollowingEndsWhereAnotherJobHasTheName) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  int jobs = 0;
  for (v1::WatchJobResponse& response : coordinator_.watch) {
    if (!response.has_job()) continue;
    response.mutable_job()->set_uid(jobs++ == 0 ? "tiny-1" : "tiny-2");
  }
  ASSERT_GE(jobs, 2);
  const Result result = Run({"watch", "tiny"});
  EXPECT_EQ(result.code, kNotFound);
  EXPECT_THAT(result.err, HasSubstr("another job has its name now (tiny-2, not tiny-1)"));
  EXPECT_THAT(result.out, Not(HasSubstr("SUCCEEDED")));
}

TEST_F(CliTest, LogsResumeBehindTheLastLine) {
  AddJob("tiny", v1::Job::RUNNING);
  for (int i = 1; i <= 4; ++i) {
    v1::LogLine& line = coordinator_.log.emplace_back();
    line.set_offset(i);
    line.set_attempt(1);
    line.set_rank(i % 2);
    line.set_text("line " + std::to_string(i));
  }
  coordinator_.break_streams_after = {2};
  const Result result = Run({"logs", "-f", "tiny", "--tail", "100"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, "[rank 1] line 1\n[rank 0] line 2\n[rank 1] line 3\n[rank 0] line 4\n");
  ASSERT_EQ(coordinator_.log_requests.size(), 2);
  EXPECT_EQ(coordinator_.log_requests[0].last_lines(), 100);
  EXPECT_EQ(coordinator_.log_requests[1].last_lines(), 0);
  EXPECT_EQ(coordinator_.log_requests[1].after_offset(), 2);
  EXPECT_EQ(Run({"logs", "tiny", "--rank", "0", "--attempt", "1"}).out, "line 2\nline 4\n");
}

TEST_F(CliTest, ProfileSaysWhereTheTracesGo) {
  coordinator_.jobs["jobs/tiny"].set_name("jobs/tiny");
  EXPECT_THAT(Run({"profile", "tiny", "--steps", "3"}).out,
              HasSubstr("tiny traces its next 3 steps into /checkpoints/3"));
  EXPECT_NE(Run({"profile", "nobody"}).code, 0);
  EXPECT_NE(Run({"profile", "tiny", "--steps", "0"}).code, 0);
}

TEST_F(CliTest, TransitionsAndTheirRefusals) {
  AddJob("tiny", v1::Job::RUNNING);
  EXPECT_EQ(Run({"pause", "tiny"}).out, "tiny is PAUSING\n");
  EXPECT_EQ(Run({"resume", "tiny"}).out, "tiny is PENDING\n");
  EXPECT_EQ(Run({"cancel", "tiny"}).out, "tiny is CANCELLING\n");
  EXPECT_FALSE(coordinator_.cancel_requests.back().checkpoint());
  EXPECT_EQ(Run({"cancel", "tiny", "--checkpoint"}).code, 0);
  EXPECT_TRUE(coordinator_.cancel_requests.back().checkpoint());
  EXPECT_EQ(Run({"delete", "tiny"}).out, "tiny is deleted\n");
  const Result missing = Run({"get", "tiny"});
  EXPECT_EQ(missing.code, kNotFound);
  EXPECT_EQ(missing.err, "ringctl: there is no jobs/tiny\n");
  AddJob("done", v1::Job::SUCCEEDED);
  EXPECT_EQ(Run({"cancel", "done"}).code, kConflict);
}

TEST_F(CliTest, NodesCanBeDrained) {
  v1::Node& node = coordinator_.nodes.emplace_back();
  node.set_name("nodes/a");
  node.set_state(v1::Node::READY);
  node.set_trainers_in_use(1);
  node.mutable_inventory()->set_trainers(2);
  node.mutable_inventory()->set_cpu_cores(8);
  node.mutable_inventory()->set_memory_bytes(uint64_t{16} << 30);
  node.add_jobs("jobs/tiny");
  node.mutable_last_heartbeat_time()->set_seconds(1'000'000 - 1);
  EXPECT_EQ(Run({"nodes"}).out,
            "NAME  STATE  TRAINERS  DEVICES  MEMORY    SEEN  JOBS  REASON\n"
            "a     READY  1/2       8 cores  16.0 GiB  1s    tiny  -\n");
  EXPECT_THAT(Run({"nodes", "-o", "json"}).out, HasSubstr("\"READY\""));
  EXPECT_EQ(Run({"drain", "a"}).out, "a is DRAINING\n");
  EXPECT_EQ(Run({"undrain", "nodes/a"}).out, "a is READY\n");
  EXPECT_EQ(Run({"drain", "b"}).code, kNotFound);
}

TEST_F(CliTest, ReportSumsUpTheSteps) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  const auto json = nlohmann::json::parse(Run({"report", "tiny", "-o", "json"}).out);
  EXPECT_EQ(json["loss_first"], 5.0);
  EXPECT_EQ(json["loss_last"], 3.0);
  EXPECT_EQ(json["heldout_first"], 5.0);
  EXPECT_EQ(json["heldout_last"], 2.5);
  EXPECT_EQ(json["tokens_per_second"], 8192.0);
  EXPECT_NEAR(json["density"].get<double>(), 0.6, 1e-9);
  EXPECT_NEAR(json["worker_imbalance"].get<double>(), 1.01, 1e-9);
  EXPECT_EQ(json["phases"]["linear"], 1.5);
  EXPECT_EQ(json["phases"]["exposed_offload"], 0.75);
  const std::string table = Run({"report", "tiny"}).out;
  EXPECT_THAT(table, HasSubstr("held-out loss                   5.0000 -> 2.5000 (-50.0 %)"));
  EXPECT_THAT(table, HasSubstr("density, layer 1                20.0 %"));
  AddJob("young", v1::Job::RUNNING);
  EXPECT_EQ(Run({"report", "young"}).code, kConflict);
  coordinator_.watch.clear();
  AddJob("stopped", v1::Job::CANCELLED);
  EXPECT_THAT(Run({"report", "stopped"}).err, HasSubstr("ended without a step"));
}

TEST_F(CliTest, PlansForMachinesThatNeedNotExist) {
  coordinator_.Stop();
  const Result result = Run({"plan", Path("job.yaml"), "--nodes", "128", "--gpus", "8"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, StartsWith("tiny on 128 nodes × 8 GPUs: context 4 × data 256"));
  EXPECT_THAT(result.out, HasSubstr("layout                 striped"));
  EXPECT_THAT(result.out, HasSubstr("worker imbalance"));
  EXPECT_THAT(result.out, HasSubstr("exposed communication"));
  const Result own = Run({"plan", Path("job.yaml"), "-o", "json"});
  EXPECT_GT(nlohmann::json::parse(own.out)["prediction"]["step_seconds"], 0);
  const Result dense = Run({"plan", Path("job.yaml"), "--density", "0.37", "-o", "json"});
  EXPECT_NEAR(nlohmann::json::parse(dense.out)["prediction"]["density"].get<double>(), 0.37, 1e-6);
  EXPECT_EQ(Run({"plan", Path("job.yaml"), "--density", "1.5"}).code, kUsage);
  const Result small = Run({"plan", Path("job.yaml"), "--memory-gib", "0.001"});
  EXPECT_EQ(small.code, kUsage);
  EXPECT_THAT(small.err, HasSubstr("the model does not fit"));
  const std::vector<std::string> on_host = {"plan", Path("job.yaml"), "--gpus",
                                            "8",    "--set",          "resources.offload=host"};
  EXPECT_THAT(Run(on_host).out, HasSubstr("wait in host memory (resources.offload)"));
  std::vector<std::string> too_small = on_host;
  too_small.insert(too_small.end(), {"--host-memory-gib", "0.000001"});
  EXPECT_THAT(Run(too_small).err, HasSubstr("its share of that is 0.00 GiB"));
}

TEST_F(CliTest, PacksData) {
  Write("a.txt", "some text that is a document");
  Write("b.txt", "and another one");
  const Result result = Run({"data", "pack", "--input", Path("a.txt"), "--input", Path("b.txt"),
                             "--output", Path("packed"), "--eval-share", "0"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("PART   TOKENS  DOCUMENTS  SHARDS\ntrain  45      2"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "packed/train/manifest.json"));
  const Result none = Run({"data", "pack", "--input", Path("none"), "--output", Path("p2")});
  EXPECT_NE(none.code, 0);
  EXPECT_THAT(none.err, HasSubstr(Path("none")));
  EXPECT_THAT(Run({"data", "pack", "--help"}).out, HasSubstr("data.document_mask: false"));
}

TEST_F(CliTest, CompletionKnowsEveryVerb) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const Result result = Run({"completion", shell});
    EXPECT_EQ(result.code, 0);
    for (const char* verb : {"submit", "list", "get", "watch", "logs", "cancel", "pause", "resume",
                             "delete", "nodes", "drain", "plan", "data", "token", "audit"}) {
      EXPECT_THAT(result.out, HasSubstr(verb)) << shell;
    }
    EXPECT_THAT(result.out, HasSubstr("follow"));
  }
  EXPECT_EQ(Run({"completion", "tcsh"}).code, kUsage);
}

TEST_F(CliTest, SettingsComeFromFlagEnvironmentFileInThatOrder) {
  environment_ = {{"HOME", folder_.string()}};
  std::filesystem::create_directories(folder_ / ".config/ringleader");
  Write(".config/ringleader/config.yaml",
        "address: " + coordinator_.address() + "\noutput: json\n");
  EXPECT_EQ(Run({"list"}).code, 0);
  EXPECT_THAT(Run({"nodes"}).out, StartsWith("{"));
  EXPECT_THAT(Run({"nodes", "-o", "table"}).out, StartsWith("NAME"));
  environment_["RINGLEADER_ADDRESS"] = "127.0.0.1:1";
  EXPECT_EQ(Run({"list", "--retry-for", "0"}).code, kUnavailable);
  EXPECT_EQ(Run({"list", "--address", coordinator_.address()}).code, 0);
  Write("other.yaml", "adress: x\n");
  const Result typo = Run({"list", "--config", Path("other.yaml")});
  EXPECT_EQ(typo.code, kUsage);
  EXPECT_THAT(typo.err, HasSubstr("unknown key adress"));
  EXPECT_EQ(Run({"list", "--config", Path("none.yaml")}).code, kNotFound);
}

TEST_F(CliTest, MistakesOnTheCommandLine) {
  EXPECT_EQ(Run({}).code, kUsage);
  const Result verb = Run({"lst"});
  EXPECT_EQ(verb.code, kUsage);
  EXPECT_THAT(verb.err, HasSubstr("lst"));
  EXPECT_EQ(Run({"submit"}).code, kUsage);
  EXPECT_EQ(Run({"list", "-o", "xml"}).code, kUsage);
  EXPECT_EQ(Run({"list", "--address", "nonsense"}).code, kUsage);
  // Plain text to another machine needs a word.
  const Result far = Run({"list", "--address", "192.0.2.1:7070"});
  EXPECT_EQ(far.code, kConflict);
  EXPECT_THAT(far.err, HasSubstr("--insecure"));
  const Result help = Run({"submit", "--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.out, HasSubstr("attention.vertical_mass"));
}

TEST(FormatTest, NumbersForPeople) {
  EXPECT_EQ(FormatCount(1234567), "1,234,567");
  EXPECT_EQ(FormatCount(-1234), "-1,234");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatBytes(512), "512 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatSeconds(3700), "1h01m");
  EXPECT_EQ(FormatSeconds(90061), "25h01m");
  EXPECT_EQ(FormatSeconds(-1), "-");
  EXPECT_EQ(FormatAge(absl::Hours(50)), "2d");
}

TEST(RequestIdTest, LooksLikeAUuidAndNeverRepeats) {
  std::set<std::string> ids;
  for (int i = 0; i < 1000; ++i) {
    const std::string id = NewRequestId();
    EXPECT_THAT(id, ::testing::MatchesRegex(
                        "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"));
    ids.insert(id);
  }
  EXPECT_EQ(ids.size(), 1000);
}

}  // namespace
}  // namespace ringleader::cli
