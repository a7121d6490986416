#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "jobspec/jobspec.h"
#include "jobspec/testing/job_file.h"

namespace ringleader::jobspec {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::kJob;

class FilesTest : public ::testing::Test {
 protected:
  FilesTest()
      : folder_(std::filesystem::path(::testing::TempDir()) /
                ("jobspec_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_ / "tokens/train");
    std::filesystem::create_directories(folder_ / "tokens/eval");
    std::ofstream(folder_ / "job.yaml") << kJob;
  }
  ~FilesTest() override { std::filesystem::remove_all(folder_); }
  void Touch(const std::string& name) { std::ofstream(folder_ / name) << "{}"; }
  absl::Status Check() { return CheckFiles(*LoadJobFile((folder_ / "job.yaml").string(), {})); }

  std::filesystem::path folder_;
};

TEST_F(FilesTest, NamesWhatIsMissing) {
  EXPECT_THAT(Check().message(), HasSubstr("model.config: no file " + folder_.string()));
  Touch("config.json");
  EXPECT_THAT(Check().message(), AllOf(HasSubstr("data.train"), HasSubstr("ringctl data pack")));
  Touch("tokens/train/manifest.json");
  EXPECT_THAT(Check().message(), HasSubstr("data.eval"));
  Touch("tokens/eval/manifest.json");
  EXPECT_TRUE(Check().ok()) << Check();
  // What `ringctl data pack --output` named holds both.
  v1::JobSpec above = *LoadJobFile((folder_ / "job.yaml").string(), {});
  above.mutable_data()->set_train((folder_ / "tokens").string());
  EXPECT_THAT(CheckFiles(above).message(),
              HasSubstr("give " + (folder_ / "tokens/train").string()));
  above = *LoadJobFile((folder_ / "job.yaml").string(), {});
  above.mutable_data()->set_eval((folder_ / "tokens").string());
  EXPECT_THAT(CheckFiles(above).message(), HasSubstr("give " + (folder_ / "tokens/eval").string()));
  Touch("checkpoints");
  EXPECT_THAT(Check().message(), HasSubstr("is a file, not a folder"));
}

TEST_F(FilesTest, WhatAJobReadsIsNotWhereItExports) {
  v1::JobSpec spec = *LoadJobFile((folder_ / "job.yaml").string(), {});
  spec.mutable_checkpoint()->set_directory((folder_ / "run").string());
  for (const char* inside : {"run/model", "run/./model/", "run/model/deeper"}) {
    spec.mutable_model()->set_init((folder_ / inside).string());
    EXPECT_THAT(CheckFiles(spec).message(),
                AllOf(HasSubstr("model.init: "), HasSubstr("is where the job exports its model")))
        << inside;
  }
  for (const char* outside : {"run/models", "model", "run"}) {
    spec.mutable_model()->set_init((folder_ / outside).string());
    EXPECT_THAT(CheckFiles(spec).message(), Not(HasSubstr("exports"))) << outside;
  }
}

TEST_F(FilesTest, AJobFileThatIsNone) {
  EXPECT_EQ(LoadJobFile((folder_ / "none.yaml").string(), {}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_FALSE(LoadJobFile(folder_.string(), {}).ok());
  EXPECT_EQ(LoadJobFile("/dev/zero", {}).status().message(),
            "job file: /dev/zero is a device; a file is expected");
  std::ofstream(folder_ / "empty.yaml") << "";
  const absl::Status empty = LoadJobFile((folder_ / "empty.yaml").string(), {}).status();
  EXPECT_EQ(empty.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(empty.message(), HasSubstr("empty.yaml: empty; see docs/job_file.md"));
}

}  // namespace
}  // namespace ringleader::jobspec
