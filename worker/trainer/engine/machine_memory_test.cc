#include "worker/trainer/engine/machine_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "base/testing/temp_dir.h"

namespace ringleader::trainer {
namespace {

// Limits here are a few dozens of it: less than what any machine that runs this has free.
constexpr uint64_t kMebibyte = 1 << 20;

class AvailableMemoryTest : public testing::Test {
 protected:
  void ProcessIsIn(const std::string& lines) { std::ofstream(temp_.File("own")) << lines; }

  void AddGroup(const std::string& path, const std::string& max, uint64_t current,
                uint64_t inactive_file) {
    const std::filesystem::path folder = temp_.path() / "root" / path;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "memory.max") << max << "\n";
    std::ofstream(folder / "memory.current") << current << "\n";
    std::ofstream(folder / "memory.stat")
        << "anon 4096\ninactive_file " << inactive_file << "\nactive_file 8192\n";
  }

  uint64_t Available() {
    return AvailableMemoryBytes(temp_.File("own"), temp_.File("root")).value();
  }

  TempDir temp_;
};

TEST_F(AvailableMemoryTest, IsTheMachinesWithoutALimit) {
  EXPECT_GT(Available(), 64 * kMebibyte) << "no control groups at all";
  ProcessIsIn("0::/system.slice/worker.service\n");
  AddGroup("system.slice/worker.service", "max", kMebibyte, 0);
  EXPECT_GT(Available(), 64 * kMebibyte);
}

TEST_F(AvailableMemoryTest, IsWhatTheOwnGroupsLimitLeaves) {
  ProcessIsIn("1:name=systemd:/elsewhere\n0::/system.slice/worker.service\n");
  AddGroup("system.slice", "max", 50 * kMebibyte, 0);
  AddGroup("system.slice/worker.service", std::to_string(32 * kMebibyte), 12 * kMebibyte,
           2 * kMebibyte);
  AddGroup("elsewhere", std::to_string(kMebibyte), 0, 0);
  EXPECT_EQ(Available(), 22 * kMebibyte);
}

TEST_F(AvailableMemoryTest, IsWhatTheTightestGroupAboveLeaves) {
  ProcessIsIn("0::/slurm/job_7/step_0/task_0\n");
  AddGroup("slurm", std::to_string(64 * kMebibyte), 10 * kMebibyte, 0);
  AddGroup("slurm/job_7", std::to_string(32 * kMebibyte), 30 * kMebibyte, kMebibyte);
  AddGroup("slurm/job_7/step_0", std::to_string(16 * kMebibyte), kMebibyte, 0);
  AddGroup("slurm/job_7/step_0/task_0", "max", kMebibyte, 0);
  EXPECT_EQ(Available(), 3 * kMebibyte);
  AddGroup("slurm/job_7", std::to_string(32 * kMebibyte), 33 * kMebibyte, 0);
  EXPECT_EQ(Available(), 0u) << "a group may hold more than a limit that was lowered";
}

TEST_F(AvailableMemoryTest, IsWhatAContainersRootLeaves) {
  AddGroup("", std::to_string(8 * kMebibyte), kMebibyte, 0);
  for (const char* own : {"0::/\n", "0::/docker/4711\n", "0::/../sibling\n"}) {
    ProcessIsIn(own);
    EXPECT_EQ(Available(), 7 * kMebibyte) << own;
  }
}

// What is free changes between two looks, but hardly by a tenth.
TEST(HostMemoryShareTest, IsAnEqualPartOfNineTenths) {
  const auto available = static_cast<double>(AvailableMemoryBytes().value());
  for (const int ranks : {1, 4}) {
    EXPECT_NEAR(static_cast<double>(HostMemoryShare(ranks).value()), 0.9 * available / ranks,
                0.09 * available / ranks)
        << ranks;
  }
}

TEST(PeakMemoryTest, IsWhatWasHeldAtMost) {
  constexpr size_t kBytes = size_t{256} << 20;
  {
    const std::vector<char> held(kBytes, 'x');
    EXPECT_EQ(held.back(), 'x');
  }
  EXPECT_GE(PeakMemoryBytes(), kBytes) << "though it has been given back";
}

TEST(FormatBytesTest, IsInTheLargestUnitThatFits) {
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(3435973837), "3.2 GiB");
  EXPECT_EQ(FormatBytes(uint64_t{5} << 50), "5120.0 TiB");
}

}  // namespace
}  // namespace ringleader::trainer
