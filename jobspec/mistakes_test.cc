// All that is wrong with a job file, in one message.
#include "jobspec/mistakes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "jobspec/jobspec.h"

namespace ringleader::jobspec {
namespace {

using ::testing::HasSubstr;

std::string Complaint(std::string_view yaml, std::vector<std::string> overrides = {}) {
  return std::string(ParseJobFile(yaml, {.overrides = std::move(overrides)}).status().message());
}

TEST(MistakesTest, AllThatIsWrongIsSaidAtOnce) {
  EXPECT_EQ(Complaint("training: {stepz: 1, seed: x}\nattention: 3\nlabels: {a: [1]}\n",
                      {"training.beta1=y"}),
            "5 mistakes:\n"
            "  job file:1: training.stepz: unknown field; did you mean training.steps?\n"
            "  job file:1: training.seed: 'x' is not allowed; give a whole number from 0 to "
            "9007199254740991\n"
            "  job file:2: attention: key: value pairs are expected\n"
            "  job file:3: labels: keys and values must be plain text\n"
            "  --set training.beta1: 'y' is not allowed; give a number from 0 to 0.9999999");
  // No more than anybody reads, of however many.
  std::string many;
  for (int i = 0; i < 10000; ++i) many += "x" + std::to_string(i) + ": 1\n";
  const std::string shown = Complaint(many);
  EXPECT_THAT(shown, ::testing::StartsWith("20 mistakes or more:\n"));
  EXPECT_EQ(std::count(shown.begin(), shown.end(), '\n'), 20);
}

TEST(MistakesTest, AFileThatCannotBeReadWholeIsCheckedAsFarAsItCan) {
  const std::string path = ::testing::TempDir() + "/mistakes_" + std::to_string(getpid()) + ".yaml";
  std::ofstream(path) << "name: A\ndata: {sequence_length: 4k, train: t}\n"
                      << "training: {stepz: 9, min_learning_rate: 1}\n"
                      << "checkpoint: {directory: c}\nresources: {trainers: 2, max_nodes: 3}\n"
                      << "model: {config: c.json}\n";
  const std::string text(LoadJobFile(path, {}).status().message());
  std::filesystem::remove(path);
  EXPECT_THAT(text, ::testing::StartsWith("3 mistakes:\n"));
  EXPECT_THAT(text, HasSubstr(":2: data.sequence_length: '4k' is not allowed"));
  EXPECT_THAT(text, HasSubstr(":3: training.stepz: unknown field; did you mean training.steps?"));
  EXPECT_THAT(text, HasSubstr("\n  name: 'A' is not allowed"));
  // Not what follows from a mistake: that training.steps is missing, or what depends on others.
  EXPECT_THAT(text, ::testing::Not(HasSubstr("required")));
}

// What of a file with very many mistakes is said hides what else may be missing.
TEST(MistakesTest, ManyMistakesAreNoReasonToGoByWhatIsMissing) {
  const std::string path = ::testing::TempDir() + "/many_" + std::to_string(getpid()) + ".yaml";
  std::ofstream file(path);
  file << "name: a\n";
  for (int i = 0; i < 20; ++i) file << "x" << i << ": 1\n";
  file.close();
  const std::string text(LoadJobFile(path, {}).status().message());
  std::filesystem::remove(path);
  EXPECT_THAT(text, ::testing::StartsWith("20 mistakes or more:\n"));
}

TEST(MistakesTest, ValidationFindsAllThatDoesNotFollowFromAnother) {
  const auto spec = ParseJobFile(R"(
name: a
model: {config: /c.json}
data: {train: /t, sequence_length: 1000}
attention: {pattern: vertical_slash, tile: 96, vertical_mass: 2}
parallelism: {context: 2, data: 3}
training: {steps: 2, warmup_steps: 5, min_learning_rate: 1, learning_rate: 1e-3}
checkpoint: {directory: /c, keep_last: 0}
resources: {trainers: 4}
)",
                                 {});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(Validate(*spec).message(),
            "2 mistakes:\n"
            "  attention.vertical_mass: 2 is out of range; give a number more than 0, at most 1\n"
            "  checkpoint.keep_last: 0 is out of range; give a whole number from 1 to 100000");
  v1::JobSpec better = *spec;
  better.mutable_checkpoint()->clear_keep_last();
  better.mutable_attention()->clear_vertical_mass();
  better.mutable_attention()->clear_tile();
  EXPECT_EQ(Validate(better).message(),
            "3 mistakes:\n"
            "  parallelism: context × data = 2 × 3 = 6, but resources.trainers is 4; make them "
            "equal\n"
            "  training.warmup_steps: 5 is more than training.steps (2)\n"
            "  training.min_learning_rate: 1 is more than training.learning_rate (0.001)");
}

TEST(MistakesTest, WhatDoesNotGoTogetherHidesNothingElseThatDoesNot) {
  const auto spec = ParseJobFile(R"(
name: a
model: {config: /c.json}
data: {train: /t, sequence_length: 4096, document_mask: false}
attention: {dense_below: 512}
parallelism: {context: 4, heads: 3}
training: {steps: 2, warmup_steps: 5}
checkpoint: {directory: /c}
resources: {trainers: 4}
)",
                                 {});
  ASSERT_TRUE(spec.ok()) << spec.status();
  const std::string text(Validate(*spec).message());
  EXPECT_THAT(text, ::testing::StartsWith("3 mistakes:\n"));
  EXPECT_THAT(text, HasSubstr("attention.dense_below: with data.document_mask: false"));
  EXPECT_THAT(text, HasSubstr("parallelism.heads: 3 does not divide parallelism.context (4)"));
  EXPECT_THAT(text, HasSubstr("training.warmup_steps: 5 is more than training.steps (2)"));
}

}  // namespace
}  // namespace ringleader::jobspec
