// ringctl against a coordinator in this process: what it lists and shows of jobs, nodes, tokens and
// the audit log, and how it changes them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/net/token.h"
#include "cli/testing/cli_fixture.h"

namespace ringleader::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

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
  EXPECT_THAT(Run({"get", "a"}).out, HasSubstr("owner           alice@example.org"));
  Run({"list", "--owner", "a\" OR \"b"});
  EXPECT_EQ(coordinator_.filters.back(), R"(owner="a\" OR \"b")");
}

TEST_F(CliTest, TheHelpOfListSaysWhatAFilterTakes) {
  const std::string help = Run({"list", "--help"}).out;
  for (const char* part : {"state, name, owner, project, or labels.KEY", "=, !=; of labels also :",
                           "labels.team:*", "joined by AND; there is no OR", "double quotes"}) {
    EXPECT_THAT(help, HasSubstr(part));
  }
  EXPECT_LE(LongestLine(help), 80) << help;
}

TEST_F(CliTest, OnATerminalReasonsAreCutAtItsWidthAndNowhereElse) {
  v1::Job& job = AddJob("a", v1::Job::PENDING);
  job.set_state_reason("needs 16 trainers; 9 free on 3 nodes, of which ünï are drained");
  const auto row = [&](int columns) {
    const std::string out = Run({"list"}, columns).out;
    return out.substr(out.find('\n') + 1);
  };
  const std::string before = "a     PENDING  0/3   -     -         -    5m   ";
  EXPECT_EQ(row(0), before + "needs 16 trainers; 9 free on 3 nodes, of which ünï are drained\n");
  EXPECT_EQ(row(200), row(0));
  EXPECT_EQ(row(80), before + "needs 16 trainers; 9 free on 3 n…\n");
  EXPECT_EQ(row(98), before + "needs 16 trainers; 9 free on 3 nodes, of which ünï…\n");
  EXPECT_EQ(row(40), before + "needs 16 …\n");
  EXPECT_EQ(row(1), row(40));
  // What takes two columns, what takes none, and what is no text at all.
  job.set_state_reason("节点正在等待更多的训练器");
  EXPECT_EQ(row(80), before + "节点正在等待更多的训练器\n");
  EXPECT_EQ(row(64), before + "节点正在等待更多…\n");
  EXPECT_EQ(row(65), before + "节点正在等待更多…\n");
  job.set_state_reason("aa\u0301aa\u0301aa\u0301aa\u0301aa\u0301aa\u0301");
  EXPECT_EQ(row(60), before + "aa\u0301aa\u0301aa\u0301aa\u0301aa\u0301aa\u0301\n");
  v1::Node& node = coordinator_.nodes.emplace_back();
  node.set_name("nodes/a");
  node.set_state_reason(std::string(500, 'x'));
  EXPECT_THAT(Run({"nodes"}, 90).out, ::testing::EndsWith("x…\n"));
  EXPECT_THAT(Run({"nodes"}).out, ::testing::EndsWith("x\n"));
}

TEST_F(CliTest, NamesAlone) {
  for (const char* id : {"a", "b", "c"}) AddJob(id, v1::Job::PENDING);
  EXPECT_EQ(Run({"list", "-o", "name"}).out, "a\nb\nc\n");
  coordinator_.nodes.emplace_back().set_name("nodes/gpu-01");
  EXPECT_EQ(Run({"nodes", "-o", "name"}).out, "gpu-01\n");
  EXPECT_EQ(Run({"get", "a", "-o", "name"}).code, kUsage);
}

// Programs need not ask whether a field is there.
TEST_F(CliTest, EmptyListsAndZerosAreThere) {
  EXPECT_EQ(Run({"list", "-o", "json"}).out,
            "{\n  \"jobs\": [],\n  \"next_page_token\": \"\",\n  \"total_size\": 0\n}\n");
  EXPECT_EQ(Run({"nodes", "-o", "yaml"}).out, "nodes:\n  []\nnext_page_token: \"\"\n");
  AddJob("a", v1::Job::PENDING).mutable_progress()->set_total_steps(7);
  const nlohmann::json job = nlohmann::json::parse(Run({"get", "a", "-o", "json"}).out);
  EXPECT_EQ(job["progress"]["total_steps"], "7") << job;
  EXPECT_EQ(job["progress"]["step"], "0") << job;
  EXPECT_EQ(job["progress"]["loss"], 0.0) << job;
  EXPECT_FALSE(job.contains("last_eval")) << "a message that is not there is not";
}

TEST_F(CliTest, ListSaysWhatItLeftOut) {
  for (const char* id : {"a", "b", "c"}) AddJob(id, v1::Job::PENDING);
  const Result result = Run({"list", "--limit", "1"});
  EXPECT_THAT(result.out, Not(HasSubstr("b  ")));
  EXPECT_THAT(result.err, HasSubstr("1 of 3 jobs"));
  const Result names = Run({"list", "--limit", "1", "-o", "name"});
  EXPECT_EQ(names.out, "a\n");
  EXPECT_THAT(names.err, HasSubstr("1 of 3 jobs"));
}

TEST_F(CliTest, GetInThreeFormats) {
  v1::Job& job = AddJob("tiny", v1::Job::FAILED);
  job.set_state_reason("out of retries");
  job.mutable_spec()->set_name("tiny");
  job.mutable_spec()->mutable_attention()->set_pattern(v1::AttentionSpec::VERTICAL_SLASH);
  job.mutable_spec()->mutable_scheduling()->set_priority(-7);
  job.mutable_spec()->mutable_checkpoint()->set_directory("/data/tiny");
  (*job.mutable_spec()->mutable_labels())["team"] = "ocean";
  (*job.mutable_spec()->mutable_labels())["a"] = "x";
  job.mutable_start_time()->set_seconds(1'000'000 - 240);
  job.mutable_end_time()->set_seconds(1'000'000 - 60);
  v1::Attempt* attempt = job.add_attempts();
  attempt->mutable_plan()->set_layout(v1::ParallelismSpec::STRIPED);
  attempt->mutable_plan()->set_stripe(64);
  attempt->mutable_plan()->mutable_ring()->set_kind(v1::ParallelismSpec::HIERARCHICAL);
  attempt->mutable_plan()->mutable_ring()->set_inner(4);
  attempt->mutable_plan()->mutable_ring()->set_outer(2);
  attempt->set_number(1);
  attempt->set_state(v1::Attempt::FAILED);
  attempt->set_last_step(2);
  attempt->add_placements()->set_node("nodes/b");
  attempt->mutable_placements(0)->set_trainers(4);
  attempt->mutable_failure()->set_rank(2);
  attempt->mutable_failure()->set_node("nodes/b");
  attempt->mutable_failure()->set_message("out of memory");
  EXPECT_EQ(Run({"get", "tiny"}).out,
            "name            tiny\n"
            "state           FAILED\n"
            "reason          out of retries\n"
            "submitted       1970-01-12 13:41:40 UTC, 5m ago\n"
            "started         1970-01-12 13:42:40 UTC, 4m ago\n"
            "ended           1970-01-12 13:45:40 UTC, 60s ago, after 3m00s\n"
            "steps           0/3\n"
            "labels          a=x, team=ocean\n"
            "priority        -7\n"
            "checkpoints in  /data/tiny\n"
            "layout          striped, stripes of 64 tokens\n"
            "ring            hierarchical, 2 inner rings of 4\n"
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

// Other readers of YAML than ours would take these for numbers, truth values, dates or nothing.
TEST_F(CliTest, YamlQuotesTextThatLooksLikeSomethingElse) {
  for (const std::string text : {"0123", "true", "2026-01-01", ".inf", "0x1F", "1_000", "null", "~",
                                 "yes", "1e3", "12:30"}) {
    coordinator_.jobs.clear();
    v1::Job& job = AddJob("tiny", v1::Job::FAILED);
    job.mutable_spec()->set_name(text);
    (*job.mutable_spec()->mutable_labels())["k"] = text;
    job.set_state_reason(text);
    for (const char* command : {"get", "list"}) {
      std::vector<std::string> arguments = {command, "-o", "yaml"};
      if (std::string(command) == "get") arguments.push_back("tiny");
      const std::string yaml = Run(arguments).out;
      const std::string quoted = absl::StrCat(": \"", text, "\"\n");
      for (const char* key : {"name", "k", "state_reason"}) {
        EXPECT_THAT(yaml, HasSubstr(key + quoted)) << command;
      }
    }
  }
}

TEST_F(CliTest, YamlLeavesNumbersTimesAndOrdinaryTextPlain) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  v1::Job& job = coordinator_.jobs["jobs/tiny"];
  job.set_revision(7);
  (*job.mutable_spec()->mutable_labels())["team"] = "ocean";
  const std::string yaml = Run({"get", "tiny", "-o", "yaml"}).out;
  for (const char* line : {"name: jobs/tiny\n", "revision: 7\n", "team: ocean\n",
                           "create_time: 1970-01-", "state: "}) {
    EXPECT_THAT(yaml, HasSubstr(line));
  }
  // Put together of messages: a list of steps with the job's name.
  const std::string history = Run({"history", "tiny", "-o", "yaml"}).out;
  EXPECT_THAT(history, HasSubstr("name: tiny\n"));
  EXPECT_THAT(history, HasSubstr("step: 1\n"));
  EXPECT_THAT(history, HasSubstr("tokens: 16384\n"));
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

TEST_F(CliTest, TransitionsAndTheirRefusals) {
  AddJob("tiny", v1::Job::RUNNING);
  EXPECT_EQ(Run({"pause", "tiny"}).out, "tiny is PAUSING\n");
  EXPECT_EQ(Run({"resume", "tiny"}).out, "tiny is PENDING\n");
  EXPECT_EQ(Run({"cancel", "tiny"}).out, "tiny is CANCELLING\n");
  EXPECT_FALSE(coordinator_.cancel_requests.back().checkpoint());
  EXPECT_EQ(Run({"cancel", "tiny", "--checkpoint"}).code, 0);
  EXPECT_TRUE(coordinator_.cancel_requests.back().checkpoint());
  AddJob("other", v1::Job::SUCCEEDED);
  const nlohmann::json deleted = {{"name", "jobs/other"}, {"deleted", true}};
  EXPECT_EQ(nlohmann::json::parse(Run({"delete", "other", "-o", "json"}).out), deleted);
  EXPECT_EQ(Run({"delete", "tiny"}).out, "tiny is deleted\n");
  const Result missing = Run({"get", "tiny"});
  EXPECT_EQ(missing.code, kNotFound);
  EXPECT_EQ(missing.err, "ringctl: there is no jobs/tiny\n");
  AddJob("done", v1::Job::SUCCEEDED);
  EXPECT_EQ(Run({"cancel", "done"}).code, kConflict);
}

// Terminals obey control characters, and nodes, trainers and other users write what is shown.
TEST_F(CliTest, ControlCharactersOfOthersAreShownAndNotObeyed) {
  const std::string evil =
      "\x1b]0;owned\x07\r\xc2\x9b"
      "2J";
  const std::string shown = "\\x1b]0;owned\\x07\\x0d\\x9b2J";
  v1::Job& job = AddJob("tiny", v1::Job::FAILED);
  job.set_state_reason(evil + "\nok is SUCCEEDED");
  job.add_attempts()->mutable_failure()->set_message(evil);
  v1::Node& node = coordinator_.nodes.emplace_back();
  node.set_name("nodes/a");
  node.set_state_reason(evil);
  node.mutable_inventory()->add_gpus()->set_model(evil);
  v1::LogLine& line = coordinator_.log.emplace_back();
  line.set_offset(1);
  line.set_text("a\tb" + evil);
  v1::WatchJobResponse& response = coordinator_.watch.emplace_back();
  *response.mutable_job() = job;
  coordinator_.validation.set_pending_reason(evil);
  coordinator_.validation.mutable_plan()->add_reasons(evil);
  const std::vector<std::vector<std::string>> commands = {
      {"list"},          {"get", "tiny"},
      {"nodes"},         {"logs", "tiny"},
      {"watch", "tiny"}, {"submit", Path("job.yaml"), "--set", "name=other", "--dry-run"}};
  for (const auto& command : commands) {
    const Result table = Run(command);
    EXPECT_THAT(table.out, HasSubstr(shown)) << command[0];
    for (const char* format : {"table", "json", "yaml"}) {
      std::vector<std::string> arguments = command;
      arguments.insert(arguments.end(), {"-o", format});
      const Result result = Run(arguments);
      EXPECT_THAT(result.out, Not(HasSubstr("\x1b"))) << command[0] << " " << format;
      EXPECT_THAT(result.out, Not(HasSubstr("\xc2\x9b"))) << command[0] << " " << format;
      EXPECT_THAT(result.out, Not(HasSubstr("\r"))) << command[0] << " " << format;
    }
  }
  EXPECT_THAT(Run({"list"}).out, HasSubstr("\\x0aok is SUCCEEDED"));
  EXPECT_THAT(Run({"logs", "tiny"}).out, HasSubstr("a\tb\\x1b"));
  EXPECT_THAT(Run({"get", evil}).err, Not(HasSubstr("\x1b")));
  EXPECT_EQ(nlohmann::json::parse(Run({"nodes", "-o", "json"}).out)["nodes"][0]["state_reason"],
            evil);
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
  EXPECT_EQ(Run({"audit", "--outcome", "permission_denied"}).code, 0);
  EXPECT_EQ(coordinator_.audit_requests.back().outcome(), "PERMISSION_DENIED");
  const Result unknown = Run({"audit", "--outcome", "denied"});
  EXPECT_EQ(unknown.code, kUsage);
  EXPECT_THAT(unknown.err, HasSubstr("--outcome: 'denied' is no gRPC code; give one of OK, "));
  EXPECT_EQ(Run({"audit", "--until", "1970-01-12T00:00:00Z"}).code, 0);
  EXPECT_EQ(coordinator_.audit_requests.back().before_time().seconds(), 950'400);
  EXPECT_EQ(Run({"audit", "--since", "yesterday"}).code, kUsage);
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
  const auto json =
      nlohmann::json::parse(Run({"token", "create", "--user", "dave", "-o", "json"}).out);
  EXPECT_EQ(TokenHash(json["token"].get<std::string>()),
            coordinator_.token_requests.back().sha256());
  EXPECT_EQ(json["user"], "dave");
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
  Write("settings.yaml", "token-file: " + Path("token") + "\n");
  EXPECT_THAT(Run({"list", "--config", Path("settings.yaml")}).err, HasSubstr("is not sent to"));
  for (const std::string& garbled : {std::string(), std::string("a\x01"), std::string(600, 'x')}) {
    Write("token", garbled);
    EXPECT_EQ(Run({"list", "--token-file", Path("token")}).code, kUsage);
  }
}

TEST_F(CliTest, WhatWasMeasuredIsExported) {
  EXPECT_THAT(Run({"latency"}).out, HasSubstr("nothing has been measured"));
  v1::LatencyTable* const table = coordinator_.measured.add_tables();
  table->mutable_machine()->set_device("NVIDIA \"H200\", SXM");
  table->mutable_shape()->set_pattern("vertical_slash");
  table->mutable_shape()->set_tile(128);
  v1::LatencyRow* const row = table->add_rows();
  row->set_tokens(65536);
  row->set_density(0.05);
  row->set_p50_ms(12.25);
  row->set_p90_ms(12.5);
  row->set_forward_p50_ms(3.5);
  v1::LinkSpeed* const link = coordinator_.measured.add_links();
  link->set_between_nodes(true);
  link->set_bytes_per_second(4.5e10);
  link->set_latency_seconds(15e-6);
  const std::string text = Run({"latency"}).out;
  EXPECT_THAT(text, HasSubstr("65,536  one        5.0 %    12.25   12.5    3.5"));
  EXPECT_THAT(text, HasSubstr("between nodes, : 45 GB/s after 15 µs"));
  EXPECT_THAT(
      Run({"latency", "--csv"}).out,
      HasSubstr("\n\"NVIDIA \"\"H200\"\", SXM\",\"\",\"\",\"\",vertical_slash,128,0,0,0,65536,"
                "0,0.05,12.25,12.5,3.5\n"));
  const auto json = nlohmann::json::parse(Run({"latency", "-o", "json"}).out);
  EXPECT_EQ(json["tables"][0]["rows"][0]["p90_ms"], 12.5);
  EXPECT_EQ(json["links"][0]["bytes_per_second"], 4.5e10);
}

}  // namespace
}  // namespace ringleader::cli
