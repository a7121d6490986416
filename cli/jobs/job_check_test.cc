// What submitting refuses of a job, as validating does, before anybody is asked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/files.h"
#include "cli/testing/cli_fixture.h"

namespace ringleader::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Before, submitting took such jobs, which then failed for want of a plan.
TEST_F(CliTest, SubmittingRefusesWhatTheModelDoesNotGoWith) {
  Write("config.json", R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256,
      "intermediate_size": 688, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320})");
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"training.precision=fp8"}, "ringctl: training.precision: fp8 leaves a model's first and "},
      {{"parallelism.heads=4", "attention.pattern=vertical_slash"},
       "ringctl: parallelism.heads: 4: a trainer would attend at a time with 1 of 4 heads"},
      {{"resources.engine=cuda", "attention.pattern=vertical_slash", "attention.dense_layers=[2]",
        "training.precision=fp8"},
       "ringctl: 2 mistakes:\n  attention.dense_layers: layer 2 does not exist; the model has 2 "
       "layers, 0 to 1\n  training.precision: fp8 leaves "}};
  for (const auto& [changes, complaint] : cases) {
    const auto run = [&](std::vector<std::string> arguments) {
      arguments.insert(arguments.begin() + 1, Path("job.yaml"));
      for (const std::string& change : changes) {
        arguments.insert(arguments.end(), {"--set", change});
      }
      return Run(arguments);
    };
    const Result validated = run({"validate"});
    EXPECT_EQ(validated.code, kUsage);
    EXPECT_THAT(validated.err, HasSubstr(complaint));
    for (const std::vector<std::string>& verb :
         std::vector<std::vector<std::string>>{{"submit"}, {"submit", "--dry-run"}}) {
      const Result submitted = run(verb);
      EXPECT_EQ(submitted.code, validated.code) << submitted.out;
      EXPECT_EQ(submitted.err, validated.err);
    }
    EXPECT_EQ(coordinator_.created, 0);
    EXPECT_EQ(run({"submit", "--no-check-files"}).code, 0) << "the model is not looked at";
    EXPECT_EQ(coordinator_.created, 1);
    coordinator_.created = 0;
    coordinator_.jobs.clear();
  }
}

// What trainers would find when they begin.
TEST_F(CliTest, ValidatingChecksWhatTrainersWill) {
  const auto complaint = [&](const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"validate", Path("job.yaml")};
    for (const std::string& set : more) arguments.insert(arguments.end(), {"--set", set});
    const Result result = Run(arguments);
    EXPECT_NE(result.code, 0) << result.out;
    EXPECT_EQ(result.out, "");
    return result.err;
  };
  WriteTokens("tokens", {.vocabulary = 321, .tokens = 100'000});
  EXPECT_THAT(complaint(), HasSubstr("data.train: " + Path("tokens") +
                                     " was packed with a vocabulary of 321, the model's vocab_size "
                                     "is 320"));
  EXPECT_EQ(Run({"submit", Path("job.yaml")}).code, kUsage) << "submitting looks, too";
  EXPECT_EQ(coordinator_.created, 0);
  WriteTokens("tokens", {.vocabulary = 320, .tokens = 100'000});
  EXPECT_THAT(complaint({"attention.pattern=dense", "attention.mask=prefix_lm"}),
              HasSubstr("tokens says of no document where its prefix ends"));
  EXPECT_THAT(
      complaint({"attention.pattern=dense", "attention.mask=full", "data.hidden_token=320"}),
      HasSubstr("data.hidden_token: 320 is outside of the model's vocabulary of 320"));
  WriteTokens("tokens", {.vocabulary = 320, .tokens = 16384});
  EXPECT_THAT(complaint(), HasSubstr("holds 16384 tokens; one sequence of 16384 needs 16385"));
  std::filesystem::remove(folder_ / "tokens/shard-00000.tokens");
  EXPECT_THAT(complaint(),
              HasSubstr("cannot open token shard " + Path("tokens/shard-00000.tokens") +
                        ": No such file or directory; its manifest names it: pack the "
                        "text again, or leave it to the trainers with --no-check-files"));
  // All at once.
  std::ofstream(folder_ / "a file") << "x";
  std::filesystem::create_symlink(folder_ / "nowhere", folder_ / "tokenizer.json");
  const std::string all =
      complaint({"attention.dense_layers=[4]", "checkpoint.directory=a file/below"});
  EXPECT_THAT(all, StartsWith("ringctl: 4 mistakes:\n  attention.dense_layers: layer 4 does not "
                              "exist; the model has 4 layers, 0 to 3\n  model.config: "));
  EXPECT_THAT(all, HasSubstr("tokenizer.json"));
  EXPECT_THAT(all, HasSubstr("\n  data.train: cannot open token shard"));
  EXPECT_THAT(all, HasSubstr("\n  checkpoint.directory: " + Path("a file") + " is a file"));

  const auto config = [&](const std::string& more) {
    Write("config.json", R"({"num_hidden_layers": 4, "hidden_size": 256, "vocab_size": 320,
        "intermediate_size": 688, "num_key_value_heads": 3, )" +
                             more + "}");
    return complaint();
  };
  EXPECT_THAT(config(R"("model_type": "gpt2", "num_attention_heads": 4)"),
              HasSubstr("is \"gpt2\"; supported: qwen2, llama"));
  EXPECT_THAT(config(R"("model_type": "llama", "num_attention_heads": 4)"),
              HasSubstr("\"num_attention_heads\" (4) must be a multiple of"));
}

// How data were packed is said before trainers begin, of what they are evaluated with, too.
TEST_F(CliTest, ValidatingChecksHowDataWerePacked) {
  const auto write = [&](const std::string& folder, const std::string& tokenizer) {
    WriteTokens(folder, {.vocabulary = 257, .tokenizer = tokenizer, .tokens = 100'000});
  };
  const auto validate = [&](const std::string& more) {
    return Run({"validate", Path("job.yaml"), "--set", more});
  };
  write("tokens", "bytes");
  write("held-out", "bytes");
  EXPECT_EQ(validate("data.eval=held-out").code, 0) << validate("data.eval=held-out").err;
  write("held-out", "other");
  EXPECT_THAT(validate("data.eval=held-out").err,
              HasSubstr("data.eval: " + Path("tokens") + " was packed with tokenizer \"bytes\""));
  std::filesystem::create_directory(folder_ / "model");
  std::filesystem::copy(folder_ / "config.json", folder_ / "model/config.json");
  Write("job.yaml", R"(
name: tiny
model: {init: model}
data: {train: tokens, sequence_length: 16384}
training: {steps: 3}
checkpoint: {directory: checkpoints}
resources: {trainers: 4}
)");
  Write("model/model.safetensors", "");  // its weights are the trainers' to read
  EXPECT_EQ(validate("training.steps=4").code, 0) << validate("training.steps=4").err;
  Write("model/tokenizer.json", "{}");
  EXPECT_THAT(validate("training.steps=4").err,
              HasSubstr("data.train: " + Path("tokens") + " was packed as bytes"));
}

// Only headers are read of shards, and of a manifest all.
TEST_F(CliTest, DamagedTokensAreRefusedBeforeAnythingBegins) {
  const auto refused = [&](const std::string& complaint) {
    const Result result = Run({"submit", Path("job.yaml")});
    EXPECT_EQ(result.code, kUsage) << result.err;
    EXPECT_THAT(result.err, HasSubstr("ringctl: data.train: "));
    EXPECT_THAT(result.err, HasSubstr(complaint));
    EXPECT_EQ(coordinator_.created, 0);
  };
  const std::string shard = Path("tokens/shard-00000.tokens");
  std::filesystem::rename(shard, shard + ".away");
  std::filesystem::create_symlink(shard, shard);
  const Result closed = Run({"submit", Path("job.yaml")});
  EXPECT_EQ(closed.code, kForbidden);
  EXPECT_THAT(closed.err, HasSubstr(shard + ": Too many levels of symbolic links; check its "));
  std::filesystem::rename(shard + ".away", shard);
  const auto bytes = std::filesystem::file_size(shard);
  std::filesystem::resize_file(shard, bytes - 1);
  refused(absl::StrCat("token shard ", shard, " is damaged: ", bytes - 1, " bytes instead of "));
  std::filesystem::resize_file(shard, 0);
  refused("0 bytes are fewer than its header's");
  std::filesystem::remove(shard);
  ASSERT_EQ(mkfifo(shard.c_str(), 0600), 0);
  refused("it is not a regular file");
  std::filesystem::remove(shard);
  data::Manifest manifest = {.vocabulary = 257, .tokens = 100'000};
  WriteTokens("tokens", manifest);
  manifest.tasks = {"recall"};
  manifest.shards = {"shard-00000.tokens"};
  ASSERT_TRUE(data::WriteManifest(Path("tokens"), manifest).ok());
  refused(shard + " is damaged: it has no marks, the manifest speaks of some");
  manifest.tasks.clear();
  ++manifest.tokens;
  ASSERT_TRUE(data::WriteManifest(Path("tokens"), manifest).ok());
  refused("manifest.json is damaged: its shards hold 100000 tokens, it says 100001");
  const absl::StatusOr<std::string> text = ReadFile(Path("tokens/manifest.json"));
  ASSERT_TRUE(text.ok()) << text.status();
  Write("tokens/manifest.json", absl::StrReplaceAll(*text, {{"100001", "-1"}}));
  refused("manifest.json is damaged: its tokens is no whole number");
  Write("tokens/manifest.json", "");
  refused("manifest.json is damaged: it is not JSON");
}

}  // namespace
}  // namespace ringleader::cli
