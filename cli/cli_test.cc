// ringctl whole, against a coordinator in this process: what a user types, and what he then reads.
// Submitting, planning, packing data, settings and mistakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

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
  const Result documents = Run({"plan", Path("job.yaml"), "--documents", "8192,64"});
  EXPECT_EQ(documents.code, kUsage);
  EXPECT_THAT(documents.err, HasSubstr("--documents: goes with attention.pattern: dense"));
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

  Write("ids", "abcd");
  Write("ids.marks", "\x02\xff");
  const Result marked = Run({"data", "pack", "--input", Path("ids"), "--output", Path("p3"),
                             "--format", "uint16", "--vocabulary", "40000", "--separator", "0",
                             "--tasks", "near,far", "--eval-share", "0", "-o", "json"});
  EXPECT_EQ(marked.code, 0) << marked.err;
  EXPECT_EQ(nlohmann::json::parse(marked.out)["tasks"], (nlohmann::json{"near", "far"}));
}

TEST_F(CliTest, MistypedCommandsAndFlagsAreNamed) {
  const std::map<std::string, std::string> meant = {{"sumbit", "submit"}, {"describe", "get"},
                                                    {"status", "get"},    {"lst", "list"},
                                                    {"kill", "cancel"},   {"canel", "cancel"}};
  for (const auto& [typed, command] : meant) {
    const Result result = Run({typed, "tiny"});
    EXPECT_EQ(result.code, kUsage);
    EXPECT_THAT(result.err, HasSubstr("unknown command \"" + typed + "\"; did you mean " + command))
        << result.err;
  }
  EXPECT_THAT(Run({"quantum"}).err, HasSubstr("unknown command \"quantum\"; see"));
  // Before the file that is missing, too.
  const Result flag = Run({"submit", "--folow"});
  EXPECT_EQ(flag.code, kUsage);
  EXPECT_THAT(flag.err, HasSubstr("unknown flag --folow"));
  EXPECT_THAT(Run({"submit"}).err, HasSubstr("file is required"));
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
  // Plain text to another machine must be asked for.
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
