// The examples that --help shows, as a user types them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "cli/testing/cli_fixture.h"
#include "jobspec/jobspec.h"

namespace ringleader::cli {
namespace {

// Lines of `help` that are commands with overrides, as ringctl's arguments.
std::vector<std::vector<std::string>> OverridesIn(const std::string& help) {
  std::vector<std::vector<std::string>> found;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    if (!absl::StartsWith(line, "  ringctl ") || !absl::StrContains(line, " --set ")) continue;
    std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    words.erase(words.begin());
    found.push_back(words);
  }
  return found;
}

// A stored job, and a file that was printed, say every default, which no example is to trip over.
TEST_F(CliTest, OverridesOfTheExamplesGoWithJobsThatSayEveryDefault) {
  auto spec =
      jobspec::LoadJobFile(Path("job.yaml"), {"resources.trainers=8", "parallelism.context="});
  ASSERT_TRUE(spec.ok()) << spec.status();
  jobspec::ApplyDefaults(&*spec);
  Write("stored.yaml", jobspec::ToYaml(*spec));
  ScriptRun("night-run", v1::Job::SUCCEEDED);
  for (v1::WatchJobResponse& response : coordinator_.watch) {
    if (response.has_job()) *response.mutable_job()->mutable_spec() = *spec;
  }
  *coordinator_.jobs["jobs/night-run"].mutable_spec() = *spec;
  int tried = 0;
  for (const char* command : {"submit", "validate", "plan"}) {
    for (std::vector<std::string> example : OverridesIn(Run({command, "--help"}).out)) {
      for (std::string& word : example) {
        if (word == "job.yaml") word = Path("stored.yaml");
      }
      const Result result = Run(example);
      EXPECT_EQ(result.code, 0) << ::testing::PrintToString(example) << result.err;
      ++tried;
    }
  }
  EXPECT_GE(tried, 4);
  for (const char* ring : {"parallelism.ring=flat", "parallelism.ring=all_gather"}) {
    const Result result = Run({"plan", "--job", "night-run", "--set", ring});
    EXPECT_EQ(result.code, 0) << ring << result.err;
  }
  const Result masked = Run({"validate", Path("stored.yaml"), "--set", "attention.pattern=dense",
                             "--set", "attention.mask=full", "--set", "data.hidden_token=300"});
  EXPECT_EQ(masked.code, 0) << masked.err;
}

}  // namespace
}  // namespace ringleader::cli
