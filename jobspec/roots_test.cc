// Paths of a job outside of the folders that an operator allows.
#include "jobspec/roots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "base/testing/temp_dir.h"
#include "jobspec/jobspec.h"

namespace ringleader::jobspec {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

v1::JobSpec Spec(const std::string& train, const std::string& checkpoints) {
  v1::JobSpec spec;
  spec.mutable_model()->set_init("random");
  spec.mutable_data()->set_train(train);
  spec.mutable_checkpoint()->set_directory(checkpoints);
  return spec;
}

absl::Status Check(const std::string& train, RootCheck check = RootCheck::kText) {
  return CheckPaths(Spec(train, "/scratch/x"), {"/data", "/scratch/"}, check);
}

TEST(RootsTest, PathsLieBelowARoot) {
  for (const char* path :
       {"/data/a", "/data", "/data/", "/data//a/./b", "/scratch/a", "/scratch"}) {
    EXPECT_TRUE(Check(path).ok()) << path;
  }
  for (const char* path : {"/data2/a", "/dat", "/", "/etc/shadow", "/data/../etc", "/data/a/../b",
                           "/data/..", "/scratch2"}) {
    EXPECT_EQ(Check(path).code(), absl::StatusCode::kPermissionDenied) << path;
  }
  EXPECT_THAT(std::string(Check("/etc").message()),
              HasSubstr("data.train: '/etc' is not, or does not lead, below /data or /scratch/"));
  EXPECT_THAT(
      std::string(CheckPaths(Spec("/data/a", "/etc"), {"/data"}, RootCheck::kText).message()),
      HasSubstr("checkpoint.directory: '/etc'"));
  EXPECT_TRUE(CheckPaths(Spec("/etc", "/etc"), {}, RootCheck::kFiles).ok());
}

TEST(RootsTest, LinksThatLeadOutAreSeen) {
  const TempDir dir;
  fs::create_directories(dir.File("data/real"));
  fs::create_directories(dir.File("secret"));
  fs::create_directory_symlink(dir.File("secret"), dir.File("data/out"));
  fs::create_directory_symlink(dir.File("data/real"), dir.File("data/in"));
  fs::create_directory_symlink(dir.File("data"), dir.File("mount"));
  const auto check = [&](const std::string& path, const std::string& root) {
    return CheckPaths(Spec(dir.File(path), dir.File(path)), {dir.File(root)}, RootCheck::kFiles)
        .ok();
  };
  EXPECT_TRUE(check("data/real", "data"));
  EXPECT_TRUE(check("data/in", "data"));
  EXPECT_TRUE(check("data/new/step-1", "data"));  // to be made
  EXPECT_FALSE(check("data/out", "data"));
  EXPECT_FALSE(check("data/out/new", "data"));
  // A root may be a link itself.
  EXPECT_TRUE(check("mount/real", "mount"));
  EXPECT_FALSE(check("mount/out", "mount"));
}

TEST(RootsTest, RootsAreAbsolute) {
  EXPECT_TRUE(CheckRoots({"/data", "/"}).ok());
  EXPECT_FALSE(CheckRoots({"data"}).ok());
  EXPECT_FALSE(CheckRoots({""}).ok());
  EXPECT_FALSE(CheckRoots({"/data/../etc"}).ok());
}

TEST(RootsTest, ControlCharactersInPathsAreRefused) {
  const auto parsed = ParseJobFile(R"(
name: a
model: {config: /job/config.json}
data: {train: "/data/a\x1b[2Jb", eval: /data/b, sequence_length: 4096}
training: {steps: 1}
checkpoint: {directory: /job/checkpoints}
resources: {trainers: 1}
)",
                                   {});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  for (const char* text : {"/data/a\x1b[2Jb", "/data/a\nb", "/data/\x7f", "/data/\xc2\x9b"}) {
    v1::JobSpec spec = *parsed;
    spec.mutable_data()->set_train(text);
    const absl::Status status = Validate(spec);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("data.train: holds control characters"));
  }
  v1::JobSpec spec = *parsed;
  spec.mutable_data()->set_train("/data/\u00fcber \u6570");
  EXPECT_TRUE(Validate(spec).ok()) << Validate(spec);
}

}  // namespace
}  // namespace ringleader::jobspec
