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
  // Nor may what lies in a folder lead out: a token shard, say, that is another group's.
  fs::create_directories(dir.File("data/mixed"));
  fs::create_symlink(dir.File("data/real"), dir.File("data/mixed/inside"));
  EXPECT_TRUE(check("data/mixed", "data"));
  fs::create_symlink(dir.File("secret/tokens"), dir.File("data/mixed/shard-00000.tokens"));
  EXPECT_FALSE(check("data/mixed", "data"));
  // A trainer writes into folders of its checkpoint folder, too.
  fs::create_directories(dir.File("data/job/profiles"));
  EXPECT_TRUE(check("data/job", "data"));
  fs::create_symlink(dir.File("secret/keys"), dir.File("data/job/profiles/rank-0.json"));
  EXPECT_FALSE(check("data/job", "data"));
  // And a link to what is not there yet may lead anywhere by the time that it is.
  fs::create_directory_symlink(dir.File("secret/later"), dir.File("data/dangling"));
  EXPECT_FALSE(check("data/dangling", "data"));
  EXPECT_FALSE(check("data/dangling/new", "data"));
  // A root may be a link itself.
  EXPECT_TRUE(check("mount/real", "mount"));
  EXPECT_FALSE(check("mount/out", "mount"));
}

// A tokenizer is copied into the exported model.
TEST(RootsTest, FilesBesideAConfigThatGoWithTheModelDoNotLeadOutEither) {
  const TempDir dir;
  fs::create_directories(dir.File("data/model"));
  fs::create_directories(dir.File("secret"));
  v1::JobSpec spec = Spec(dir.File("data/tokens"), dir.File("data/job"));
  spec.mutable_model()->set_config(dir.File("data/model/config.json"));
  const auto check = [&] { return CheckPaths(spec, {dir.File("data")}, RootCheck::kFiles); };
  fs::create_symlink(dir.File("secret/x"), dir.File("data/model/notes.txt"));  // is not read
  EXPECT_TRUE(check().ok()) << check();
  fs::create_symlink(dir.File("secret/key"), dir.File("data/model/merges.txt"));
  EXPECT_EQ(check().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(check().message()), HasSubstr("model.config: '"));
  EXPECT_THAT(std::string(check().message()), HasSubstr("merges.txt' is not"));
}

TEST(RootsTest, RootsAreAbsolute) {
  EXPECT_TRUE(CheckRoots({"/data", "/"}).ok());
  EXPECT_FALSE(CheckRoots({"data"}).ok());
  EXPECT_FALSE(CheckRoots({""}).ok());
  EXPECT_FALSE(CheckRoots({"/data/../etc"}).ok());
  EXPECT_FALSE(CheckRoots({"/data/\x1b[2J"}).ok());
}

TEST(RootsTest, WhereOthersReachTheCoordinatorRootsMustBeGiven) {
  const Address here{.host = "127.0.0.1", .port = 1, .path = ""};
  const Address everywhere{.host = "0.0.0.0", .port = 1, .path = ""};
  EXPECT_TRUE(CheckRootsGiven({}, here).ok());
  EXPECT_TRUE(CheckRootsGiven({"/"}, everywhere).ok());
  const absl::Status missing = CheckRootsGiven({}, everywhere);
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("--allow-path / for anywhere"));
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
