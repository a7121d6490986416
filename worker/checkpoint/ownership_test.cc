#include "worker/checkpoint/ownership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/testing/temp_dir.h"
#include "worker/checkpoint/checksummed_json.h"

namespace ringleader::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class OwnershipTest : public ::testing::Test {
 protected:
  absl::Status Claim(const std::string& job, const std::string& uid, uint64_t token,
                     const std::string& owner = "") {
    return ClaimDirectory(directory_, {.job = job, .uid = uid, .token = token, .owner = owner});
  }
  absl::Status Change(const std::string& uid, uint64_t token) {
    changed_ = false;
    return ChangeAsOwner(directory_, {.job = "j", .uid = uid, .token = token}, [this] {
      changed_ = true;
      return absl::OkStatus();
    });
  }

  TempDir temp_;
  const std::string directory_ = temp_.path().string();
  const std::string path_ = directory_ + "/owner.json";
  bool changed_ = false;
};

TEST_F(OwnershipTest, TheNewestAttemptOfAJobHasItsFolder) {
  EXPECT_EQ(Claim("j", "j-1", 5), absl::OkStatus());
  EXPECT_EQ(Claim("j", "j-1", 5), absl::OkStatus());
  EXPECT_EQ(Change("j-1", 5), absl::OkStatus());
  EXPECT_TRUE(changed_);
  EXPECT_EQ(Claim("j", "j-1", 7), absl::OkStatus());
  EXPECT_EQ(Change("j-1", 5).code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(changed_);
  const absl::Status late = Claim("j", "j-1", 6);
  EXPECT_EQ(late.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(late.message()),
              AllOf(HasSubstr(directory_), HasSubstr("token 7"), HasSubstr("this one has 6")));
  EXPECT_EQ(Change("j-1", 7), absl::OkStatus());
}

TEST_F(OwnershipTest, AnotherJobIsRefusedByName) {
  ASSERT_EQ(Claim("j", "j-1", 5), absl::OkStatus());
  const absl::Status other = Claim("k", "k-2", 9);
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other.message()),
              AllOf(HasSubstr("belongs to jobs/j (j-1), not to jobs/k"),
                    HasSubstr("choose another folder, or remove " + path_)));
  EXPECT_EQ(Change("k-2", 9).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Change("j-1", 5), absl::OkStatus());
}

// The export takes the place of what is called `model`: a user's own would be gone.
TEST_F(OwnershipTest, AModelThatNoJobWroteIsNotReplaced) {
  std::filesystem::create_directories(directory_ + "/model");
  const absl::Status refused = Claim("j", "j-1", 5);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr(directory_ + "/model is there"));
  EXPECT_FALSE(std::filesystem::exists(path_));
  // Checkpoints beside it are of a job, of a release that wrote no owner down.
  std::filesystem::create_directories(directory_ + "/step-0000000001");
  EXPECT_EQ(Claim("j", "j-1", 5), absl::OkStatus());
  std::filesystem::remove_all(directory_ + "/step-0000000001");
  EXPECT_EQ(Claim("j", "j-1", 6), absl::OkStatus()) << "its own export";
}

// The first was deleted, and the second was given its name.
TEST_F(OwnershipTest, ALaterJobOfTheNameTakesOverAndTheEarlierOneIsToldApart) {
  ASSERT_EQ(Claim("j", "j-1", 5), absl::OkStatus());
  // A coordinator that forgot what it had counted to.
  EXPECT_EQ(Claim("j", "j-2", 5).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Claim("j", "j-2", 6), absl::OkStatus());
  EXPECT_EQ(Change("j-1", 6).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Change("j-2", 6), absl::OkStatus());
}

// Alice's job was deleted, and Bob gave his own its name: her weights are not his to go on from.
TEST_F(OwnershipTest, ALaterJobOfTheNameIsRefusedWhereItIsSomebodyElses) {
  ASSERT_EQ(Claim("j", "j-1", 5, "alice"), absl::OkStatus());
  for (const std::string other : {"bob", ""}) {
    const absl::Status refused = Claim("j", "j-2", 9, other);
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << other;
    EXPECT_THAT(
        std::string(refused.message()),
        AllOf(HasSubstr("checkpoint.directory " + directory_ + " belongs to alice"),
              HasSubstr("jobs/j (j-1)"), HasSubstr(other.empty() ? "no owner" : "is of bob"),
              HasSubstr("choose another folder"), HasSubstr("remove " + path_)));
  }
  EXPECT_EQ(Change("j-1", 5), absl::OkStatus()) << "it is still the first one's";
  EXPECT_THAT(std::string(Claim("k", "k-1", 9, "bob").message()),
              HasSubstr("belongs to jobs/j (j-1) of alice, not to jobs/k"));
  EXPECT_EQ(Claim("j", "j-2", 9, "alice"), absl::OkStatus()) << "her own later one goes on";
  EXPECT_EQ(Claim("j", "j-1", 10, "alice"), absl::OkStatus());
}

// Files of earlier releases name no owner, and so do jobs from before there were roles.
TEST_F(OwnershipTest, AFolderOfNobodysIsTheNextJobsOfTheName) {
  ASSERT_EQ(Claim("j", "j-1", 5), absl::OkStatus());
  EXPECT_EQ(Claim("j", "j-2", 6, "alice"), absl::OkStatus());
  EXPECT_EQ(ParseOwner(*ReadFile(path_), path_)->owner, "alice");
  EXPECT_EQ(Claim("j", "j-3", 7, "bob").code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(OwnershipTest, ARemovedOwnerIsNobodysWord) {
  ASSERT_EQ(Claim("j", "j-1", 5), absl::OkStatus());
  std::filesystem::remove(path_);
  EXPECT_THAT(std::string(Change("j-1", 5).message()), HasSubstr(path_ + " is gone"));
  EXPECT_FALSE(changed_);
}

TEST_F(OwnershipTest, AHeldLockIsWaitedForAndAnEndedHolderHasNone) {
  ASSERT_EQ(Claim("j", "j-1", 5), absl::OkStatus());
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t holder = fork();
  if (holder == 0) {
    (void)ChangeAsOwner(directory_, {.job = "j", .uid = "j-1", .token = 5}, [&] {
      (void)!write(ready[1], "x", 1);
      pause();
      return absl::OkStatus();
    });
    _exit(1);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  const FolderOwner next = {.job = "j", .uid = "j-1", .token = 6};
  const absl::Status busy = ClaimDirectory(directory_, next, absl::Milliseconds(200));
  EXPECT_EQ(busy.code(), absl::StatusCode::kUnavailable);
  // Stopped as it is, half-way between looking and changing, it is killed, and changes nothing.
  kill(holder, SIGSTOP);
  kill(holder, SIGKILL);
  EXPECT_EQ(ClaimDirectory(directory_, next), absl::OkStatus());
  waitpid(holder, nullptr, 0);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(OwnershipTest, ReadsTheGoldenFileAndWritesTheSameBytes) {
  const std::string golden = *ReadFile("tests/golden/checkpoint-v1/owner.json");
  const absl::StatusOr<FolderOwner> owner = ParseOwner(golden, "golden");
  ASSERT_TRUE(owner.ok()) << owner.status();
  EXPECT_EQ(owner->job, "tiny");
  EXPECT_EQ(owner->uid, "tiny-17a3");
  EXPECT_EQ(owner->token, 57u);
  EXPECT_EQ(owner->owner, "");
  EXPECT_EQ(OwnerText(*owner), golden);
}

// A folder of a newer program is neither taken nor written over.
TEST_F(OwnershipTest, ANewerVersionIsLeftAloneByName) {
  nlohmann::json owner = nlohmann::json::parse(OwnerText({.job = "j", .uid = "j-1", .token = 5}));
  owner["version"] = 2;
  owner[kChecksumKey] = ChecksumOf(owner);
  std::ofstream(path_) << owner;
  const absl::Status claimed = Claim("j", "j-1", 6);
  EXPECT_EQ(claimed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(claimed.message()),
              AllOf(HasSubstr(path_), HasSubstr("format version 2")));
  EXPECT_EQ(Change("j-1", 5).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(changed_);
  EXPECT_EQ(nlohmann::json::parse(*ReadFile(path_)), owner);
}

TEST_F(OwnershipTest, AFlippedBitAnywhereIsNoticed) {
  const std::string whole = OwnerText({.job = "j", .uid = "j-1", .token = 5, .owner = "alice"});
  for (size_t byte = 0; byte < whole.size(); ++byte) {
    std::string damaged = whole;
    damaged[byte] ^= static_cast<char>(1 << (byte % 8));
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << damaged;
    const absl::Status claimed = Claim("j", "j-1", 6);
    // Blanks between JSON tokens carry nothing.
    if (std::isspace(static_cast<unsigned char>(whole[byte])) != 0 && claimed.ok()) continue;
    EXPECT_EQ(claimed.code(), absl::StatusCode::kDataLoss) << byte;
    EXPECT_THAT(std::string(claimed.message()), HasSubstr(path_));
  }
}

}  // namespace
}  // namespace ringleader::checkpoint
