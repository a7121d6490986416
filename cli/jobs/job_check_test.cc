// What submitting refuses of a job, as validating does, before anybody is asked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cli/testing/cli_fixture.h"

namespace ringleader::cli {
namespace {

using ::testing::HasSubstr;

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

}  // namespace
}  // namespace ringleader::cli
