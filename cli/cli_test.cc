// ringctl whole, against a coordinator in this process: what a user types, and what he then reads.
// Submitting, packing data, settings and mistakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "cli/app.h"
#include "cli/client.h"
#include "cli/printer.h"
#include "cli/testing/cli_fixture.h"

namespace ringleader::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

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
  const Result range = Run({"submit", Path("job.yaml"), "--set", "attention.pattern=vertical_slash",
                            "--set", "attention.vertical_mass=2"});
  EXPECT_EQ(range.code, kUsage);
  EXPECT_THAT(range.err, HasSubstr("attention.vertical_mass: 2 is out of range"));
  const Result all = Run({"submit", Path("job.yaml"), "--set", "trainin.steps=1", "--set",
                          "training.seed=x", "--set", "name=No"});
  EXPECT_EQ(all.code, kUsage);
  EXPECT_THAT(all.err, StartsWith("ringctl: 3 mistakes:\n  --set trainin.steps: unknown field"));
  EXPECT_EQ(std::count(all.err.begin(), all.err.end(), '\n'), 4) << all.err;
  const Result name = Run({"submit", Path("job.yaml"), "--set", "atention.tile=64"});
  EXPECT_THAT(name.err, HasSubstr("did you mean attention.tile?"));
  const Result file = Run({"submit", Path("none.yaml")});
  EXPECT_EQ(file.code, kNotFound);
  std::filesystem::remove(folder_ / "tokens/manifest.json");
  const Result shards = Run({"submit", Path("job.yaml")});
  EXPECT_EQ(shards.code, kNotFound);
  EXPECT_THAT(shards.err, HasSubstr("data.train"));
}

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

TEST_F(CliTest, WhatTakesTheCoordinatorTooLongIsNotItsAbsence) {
  const std::string reason = "looking for the job's files: no answer within 10s";
  coordinator_.refusal = {grpc::StatusCode::DEADLINE_EXCEEDED, reason};
  const Result result = Run({"submit", Path("job.yaml")});
  EXPECT_EQ(result.code, kUnavailable);
  EXPECT_EQ(result.err, "ringctl: " + reason + "\n");
  EXPECT_EQ(coordinator_.request_ids.size(), 1);
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
  EXPECT_THAT(result.out, HasSubstr("layout: auto  # striped, stripes of 64 tokens\n"));
  EXPECT_THAT(result.out, HasSubstr("layout  striped, stripes of 64 tokens"));
  EXPECT_THAT(result.out, HasSubstr("would wait: needs 4 trainers"));
  EXPECT_EQ(coordinator_.created, 0);
  ASSERT_EQ(Run({"submit", Path("job.yaml")}).code, 0);
  const Result again = Run({"submit", Path("job.yaml"), "--dry-run"});
  EXPECT_EQ(again.code, Run({"submit", Path("job.yaml")}).code) << "of a name that is taken";
  EXPECT_NE(again.code, 0);
  EXPECT_THAT(again.err, HasSubstr("jobs/tiny exists already; choose another name"));
  EXPECT_EQ(coordinator_.created, 1);
}

TEST_F(CliTest, ValidatingNeedsNoCoordinator) {
  coordinator_.Stop();
  const Result result = Run({"validate", Path("job.yaml")});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  for (const char* line :
       {"\n  keep_last: 2\n", "\n  layout: auto  # striped, stripes of 64 tokens\n",
        "\n  ring: auto  # ", "\n  threads: 0  # a node's cores divided by its trainers\n",
        "\n  recompute: auto  # none where a trainer has ", "\n  dense_layers: []\n",
        "\nworker imbalance", "\nplanned for 1 node of 4 trainers with "}) {
    EXPECT_THAT(result.out, HasSubstr(line));
  }
  const auto json = nlohmann::json::parse(Run({"validate", Path("job.yaml"), "-o", "json"}).out);
  EXPECT_EQ(json["auto"]["parallelism.layout"], "striped, stripes of 64 tokens");
  EXPECT_EQ(json["spec"]["checkpoint"]["keep_last"], 2);
  EXPECT_EQ(json["plan"]["layout"], "STRIPED");
  // So does a dry run, which says that it would have asked.
  const Result dry = Run({"submit", Path("job.yaml"), "--dry-run"});
  EXPECT_EQ(dry.code, 0) << dry.err;
  EXPECT_EQ(dry.out, result.out);
  EXPECT_THAT(dry.err, HasSubstr("no coordinator answers at 127.0.0.1:"));
  // GPUs come in nodes of eight.
  const Result gpus = Run({"validate", Path("job.yaml"), "--set", "resources.engine=cuda", "--set",
                           "resources.trainers=16", "--set", "parallelism.context=16"});
  EXPECT_THAT(gpus.out, HasSubstr("planned for 2 nodes of 8 GPUs with 139 GiB each"));
  EXPECT_THAT(gpus.out, HasSubstr("\n  offload: auto  # none where a trainer has 139 GiB\n"));
  // Files that are elsewhere are not looked at, and then nothing is predicted.
  std::filesystem::remove_all(folder_ / "tokens");
  std::filesystem::remove(folder_ / "config.json");
  const Result seeing = Run({"validate", Path("job.yaml")});
  EXPECT_EQ(seeing.code, kNotFound);
  EXPECT_THAT(seeing.err, HasSubstr("on this machine; --no-check-files leaves it to"));
  const Result blind = Run({"validate", Path("job.yaml"), "--no-check-files"});
  EXPECT_EQ(blind.code, 0) << blind.err;
  EXPECT_THAT(blind.out, HasSubstr("the model's config.json cannot be read here"));
}

TEST_F(CliTest, PacksData) {
  Write("a.txt", "some text that is a document");
  Write("b.txt", "and another one");
  const Result result = Run({"data", "pack", "--input", Path("a.txt"), "--input", Path("b.txt"),
                             "--output", Path("packed"), "--eval-share", "0"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("PART   TOKENS  DOCUMENTS  SHARDS\ntrain  45      2"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "packed/train/manifest.json"));
  std::filesystem::create_symlink("nowhere", folder_ / "packed/link.txt");
  const Result twice =
      Run({"data", "pack", "--input", Path("packed"), "--input", Path("a.txt"), "--input",
           Path("a.txt"), "--suffix", ".txt", "--output", Path("p1"), "--eval-share", "0"});
  EXPECT_THAT(twice.out,
              HasSubstr("1 files left out; in " + Path("p1") + "\n1 of these, as " +
                        Path("packed/link.txt") + ", are links to folders or to nothing\n" +
                        "1 paths, as " + Path("a.txt") + ", lead to files that are packed"));
  const Result none = Run({"data", "pack", "--input", Path("none"), "--output", Path("p2")});
  EXPECT_NE(none.code, 0);
  EXPECT_THAT(none.err, HasSubstr(Path("none")));
  EXPECT_THAT(Run({"data", "pack", "--help"}).out, HasSubstr("data.document_mask: false"));

  Write("ids", "abcd");
  Write("ids.marks", "\x02\xff");
  const Result marked = Run({"data", "pack", "--input", Path("ids"), "--output", Path("p3"),
                             "--format", "uint16", "--vocabulary", "40000", "--separator", "0",
                             "--tasks", "near,far", "--eval-share", "0", "-o", "json"});
  EXPECT_EQ(marked.code, 0) << marked.err;
  EXPECT_EQ(nlohmann::json::parse(marked.out)["tasks"], (nlohmann::json{"near", "far"}));
}

TEST_F(CliTest, ABenchThatIsNotThereIsNamed) {
  const Result none = Run({"bench", "attention", "--program", Path("none"), "--tokens", "128"});
  EXPECT_EQ(none.code, kNotFound);
  EXPECT_THAT(none.err, HasSubstr("cannot start " + Path("none") + ": No such file"));
  EXPECT_EQ(Run({"bench"}).code, kUsage);
}

TEST_F(CliTest, MistypedCommandsAndFlagsAreNamed) {
  const std::map<std::string, std::string> meant = {{"sumbit", "submit"}, {"describe", "get"},
                                                    {"status", "get"},    {"lst", "list"},
                                                    {"kill", "cancel"},   {"canel", "cancel"}};
  for (const auto& [typed, command] : meant) {
    const Result result = Run({typed, "tiny"});
    EXPECT_EQ(result.code, kUsage);
    EXPECT_THAT(result.err,
                HasSubstr(absl::StrCat("unknown command \"", typed, "\"; did you mean ", command)))
        << result.err;
  }
  EXPECT_THAT(Run({"quantum"}).err, HasSubstr("unknown command \"quantum\"; see"));
  // Before the file that is missing, too.
  const Result flag = Run({"submit", "--folow"});
  EXPECT_EQ(flag.code, kUsage);
  EXPECT_THAT(flag.err, HasSubstr("unknown flag --folow; did you mean --follow?; see ringctl "
                                  "submit --help"));
  EXPECT_THAT(Run({"data", "pack", "--tokens", "u32"}).err,
              HasSubstr("unknown flag --tokens; see ringctl data pack --help"));
  EXPECT_THAT(Run({"submit", "--ste=a"}).err,
              HasSubstr("unknown flag --ste=a; did you mean --set?"));
  EXPECT_THAT(Run({"submit"}).err, HasSubstr("file is required"));
}

// CLI11 would print 300 digits, and the numbers of enumerators.
TEST_F(CliTest, RangesAndChoicesCanBeRead) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> mistakes = {
      {{"plan", "x", "--memory-gib", "0"}, "'0' is not allowed; give a number more than 0"},
      {{"plan", "x", "--memory-gib", "1e999"}, "'1e999' is not allowed"},
      {{"plan", "x", "--documents", "64,0"}, "'0' is not allowed; give a number more than 0"},
      {{"logs", "x", "--rank", "-3"}, "'-3' is not allowed; give a number of 0 or more"},
      {{"list", "--retry-for", "nan"}, "'nan' is not allowed; give a number of 0 or more"},
      {{"list", "--retry-for", "\x1b[2J"}, "'\\x1b[2J' is not allowed"},
      {{"list", "--config", ""}, "--config: the name is empty; name a file, or leave the flag out"},
      {{"list", "--token-file", ""}, "--token-file: the name is empty"},
      {{"data", "pack", "--input", "x", "--output", "y", "--format", "parquet"},
       "parquet not in {text,uint16,uint32}"},
      {{"token", "create", "--user", "a", "--role", "node"}, "node not in {admin,user,viewer}"},
  };
  for (const auto& [arguments, complaint] : mistakes) {
    const Result result = Run(arguments);
    EXPECT_EQ(result.code, kUsage);
    EXPECT_THAT(result.err, HasSubstr(complaint));
    EXPECT_LT(result.err.size(), 200u) << result.err;
  }
  for (const std::vector<std::string>& verb : std::vector<std::vector<std::string>>{
           {"plan"}, {"logs"}, {"data", "pack"}, {"token", "create"}}) {
    std::vector<std::string> arguments = verb;
    arguments.push_back("--help");
    const std::string help = Run(arguments).out;
    EXPECT_THAT(help, ::testing::Not(::testing::ContainsRegex("[0-9]{30}"))) << verb[0];
    EXPECT_THAT(help, ::testing::Not(HasSubstr("->"))) << verb[0];
  }
}

TEST_F(CliTest, EveryHelpHasExamples) {
  const std::string help = Run({"--help"}).out;
  EXPECT_LE(LongestLine(help), 80);
  std::istringstream lines(help.substr(help.find("Subcommands:")));
  int verbs = 0;
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line) && line.starts_with("  ")) {
    if (line[2] == ' ') continue;  // the rest of a long description
    const std::string verb = line.substr(2, line.find(' ', 2) - 2);
    const std::string of_verb = Run({verb, "--help"}).out;
    EXPECT_THAT(of_verb, ::testing::ContainsRegex("Examples:\n +[a-z< (]*ringctl " + verb)) << verb;
    EXPECT_LE(LongestLine(of_verb), 80) << of_verb;
    ++verbs;
  }
  EXPECT_GE(verbs, 20);
  for (const char* verb : {"create", "list", "revoke"}) {
    EXPECT_THAT(Run({"token", verb, "--help"}).out,
                HasSubstr(std::string("\n  ringctl token ") + verb));
  }
  const std::string pack = Run({"data", "pack", "--help"}).out;
  EXPECT_THAT(pack, HasSubstr("\n  ringctl data pack"));
  EXPECT_LE(LongestLine(pack), 80) << pack;
  EXPECT_THAT(Run({"submit", "--help"}).out,
              HasSubstr("\n  --no-check-files            the job's"));
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
    EXPECT_THAT(result.out, HasSubstr("training.steps="));
    EXPECT_THAT(result.out, HasSubstr("ringctl --retry-for 0 -o name"));
  }
  EXPECT_EQ(Run({"completion", "tcsh"}).code, kUsage);
}

// The script in a real shell, with a ringctl that says what a test wants.
TEST_F(CliTest, BashCompletesVerbsFlagsFieldsAndNames) {
  Write("complete.bash", Run({"completion", "bash"}).out);
  Write("jobs", "headers-16k\nhead$(touch hacked)\ntail\n");
  const auto complete = [&](const std::string& words) {
    const std::string script = "cd " + folder_.string() +
                               "; ringctl() { [[ $* == *list* ]] && cat jobs || echo gpu-01; }; "
                               "source complete.bash; COMP_WORDS=(" +
                               words +
                               "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _ringctl; "
                               "printf '%s ' \"${COMPREPLY[@]}\"";
    Write("run.bash", script);
    std::string out;
    FILE* pipe = popen(("bash " + Path("run.bash")).c_str(), "r");
    for (int c = 0; (c = std::fgetc(pipe)) != EOF;) out += static_cast<char>(c);
    pclose(pipe);
    return out;
  };
  EXPECT_EQ(complete("ringctl val"), "validate ");
  EXPECT_EQ(complete("ringctl logs --ra"), "--rank ");
  EXPECT_EQ(complete("ringctl submit job.yaml --set training.st"), "training.steps= ");
  EXPECT_EQ(complete("ringctl watch head"), "headers-16k head$(touch hacked) ");
  EXPECT_EQ(complete("ringctl history ta"), "tail ");
  EXPECT_EQ(complete("ringctl drain ''"), "gpu-01 ");
  EXPECT_EQ(complete("ringctl --address gpu-01:7070 -o json can"), "cancel ");
  EXPECT_EQ(complete("ringctl --config watch can"), "cancel ") << "watch is a file's name";
  EXPECT_EQ(complete("ringctl --address gpu-01 watch head"), " ") << "another coordinator's jobs";
  EXPECT_EQ(complete("ringctl --address gpu-01 logs --ra"), "--rank ");
  EXPECT_EQ(complete("ringctl --add"), "--address ");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "hacked"));
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
  // Keys are spelled as flags are, in every program's file.
  Write("other.yaml", "tls_cert: x\n");
  EXPECT_THAT(Run({"list", "--config", Path("other.yaml")}).err,
              HasSubstr("unknown key tls_cert; did you mean tls-cert?"));
  Write("other.yaml", "tls-cert: /none\ntls-key: /none\ntls-ca: /none\ntoken-file: /none\n");
  EXPECT_THAT(Run({"list", "--config", Path("other.yaml")}).err, HasSubstr("/none"));
  EXPECT_EQ(Run({"list", "--config", Path("none.yaml")}).code, kNotFound);
  const Result folder = Run({"list", "--config", Path(".config")});
  EXPECT_EQ(folder.code, kUsage);
  EXPECT_THAT(folder.err, HasSubstr("is a folder; a file is expected"));
}

TEST_F(CliTest, TheFileLiesWhereXdgSays) {
  const std::string address = "address: " + coordinator_.address() + "\n";
  std::filesystem::create_directories(folder_ / ".config/ringleader");
  std::filesystem::create_directories(folder_ / "xdg/ringleader");
  Write(".config/ringleader/config.yaml", address);
  Write("xdg/ringleader/config.yaml", address + "output: json\n");
  environment_ = {{"HOME", folder_.string()}, {"XDG_CONFIG_HOME", Path("xdg")}};
  EXPECT_THAT(Run({"nodes"}).out, StartsWith("{"));
  for (const char* const unset : {"", "xdg"}) {
    environment_["XDG_CONFIG_HOME"] = unset;
    EXPECT_THAT(Run({"nodes"}).out, StartsWith("NAME")) << unset;
  }
}

// Its address would be left out, and another coordinator be spoken to.
TEST_F(CliTest, SettingsThatCannotBeReadAreAnError) {
  Write("mine.yaml", "address: " + coordinator_.address() + "\n");
  std::filesystem::permissions(folder_, std::filesystem::perms::all);
  std::filesystem::permissions(folder_ / "mine.yaml", std::filesystem::perms::none);
  const bool is_root = geteuid() == 0;  // who reads everything
  ASSERT_EQ(is_root ? seteuid(65534) : 0, 0);
  const Result result = Run({"list", "--config", Path("mine.yaml"), "--retry-for", "0"});
  ASSERT_EQ(is_root ? seteuid(0) : 0, 0);
  EXPECT_THAT(result.err, HasSubstr("mine.yaml: Permission denied"));
  EXPECT_NE(result.code, kUnavailable);
}

TEST_F(CliTest, MistakesOnTheCommandLine) {
  EXPECT_EQ(Run({}).code, kUsage);
  const Result verb = Run({"lst"});
  EXPECT_EQ(verb.code, kUsage);
  EXPECT_THAT(verb.err, HasSubstr("lst"));
  EXPECT_EQ(Run({"submit"}).code, kUsage);
  EXPECT_EQ(Run({"list", "-o", "xml"}).code, kUsage);
  EXPECT_EQ(Run({"list", "--address", "nonsense"}).code, kUsage);
  // Plain text to another machine must be asked for.
  const Result far = Run({"list", "--address", "192.0.2.1:7070"});
  EXPECT_EQ(far.code, kConflict);
  EXPECT_THAT(far.err, HasSubstr("--insecure"));
  const Result help = Run({"submit", "--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.out, HasSubstr("attention.vertical_mass"));
}

// A watch then ends at once: how the job ends nobody would read.
TEST_F(CliTest, OutputThatIsLostIsAFailure) {
  ScriptRun("tiny", v1::Job::FAILED);
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"list", "-o", "json"}, {"--help"}, {"watch", "tiny"}}) {
    std::ofstream full("/dev/full");
    std::ostringstream err;
    Context context{.out = full, .err = err, .environment = [this](const char* name) {
                      const auto found = environment_.find(name);
                      return found == environment_.end() ? std::nullopt
                                                         : std::optional(found->second);
                    }};
    EXPECT_EQ(RunRingctl(arguments, std::move(context)), kOutputLost);
    EXPECT_THAT(err.str(), HasSubstr("not all of the output could be written"));
  }
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
