// Shards that are larger than what is read of them at a time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/process/progress.h"
#include "base/testing/temp_dir.h"
#include "worker/checkpoint/format.h"

namespace ringleader::checkpoint {
namespace {

class ShardFileTest : public ::testing::Test {
 protected:
  // Three arrays of 1.2 MB, of elements 64 and up of the flat space.
  static constexpr int64_t kElements = 300'000, kBegin = 64;

  void SetUp() override {
    const auto counted = [](float from) {
      std::vector<float> values(kElements);
      std::iota(values.begin(), values.end(), from);
      return values;
    };
    shard_ = {.begin = kBegin,
              .master = counted(0),
              .first_moment = counted(0.25f),
              .second_moment = counted(0.5f)};
    const auto checksum = WriteShardFile(path_, shard_, kElements);
    ASSERT_TRUE(checksum.ok()) << checksum.status();
    file_ = {.name = "shard", .begin = kBegin, .elements = kElements, .checksum = *checksum};
  }
  absl::Status Verify() const { return VerifyShardFile(temp_.path().string(), file_); }
  void FlipBitAt(int64_t offset) const {
    std::fstream bytes(path_, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(offset);
    const int byte = bytes.get();
    bytes.seekp(offset);
    bytes.put(static_cast<char>(byte ^ 1));
    ASSERT_TRUE(bytes.good());
  }

  TempDir temp_;
  const std::string path_ = temp_.File("shard");
  optim::OptimizerShard shard_;
  ShardFile file_;
};

TEST_F(ShardFileTest, AllOfItIsVerified) {
  EXPECT_EQ(Verify(), absl::OkStatus());
  constexpr int64_t kPiece = 1 << 20, kEnd = 64 + 3 * kElements * 4;
  for (const int64_t offset : {int64_t{0}, kPiece - 1, kPiece, 3 * kPiece, kEnd - 1}) {
    FlipBitAt(offset);
    EXPECT_EQ(Verify().code(), absl::StatusCode::kDataLoss) << offset;
    FlipBitAt(offset);
  }
  EXPECT_EQ(Verify(), absl::OkStatus());
}

TEST_F(ShardFileTest, ARangeIsReadToItsPlace) {
  constexpr int64_t kFrom = kBegin + 1000, kCount = 280'000;
  optim::OptimizerShard out{.begin = kFrom - 7,
                            .master = std::vector<float>(kCount + 9, -1),
                            .first_moment = std::vector<float>(kCount + 9, -1),
                            .second_moment = std::vector<float>(kCount + 9, -1)};
  const uint64_t before = Progress::count();
  ASSERT_EQ(ReadShardRange(temp_.path().string(), file_, kFrom, kCount, out), absl::OkStatus());
  EXPECT_GE(Progress::count(), before + 3) << "one that takes minutes passes for a hang otherwise";
  for (const auto& [read, written] : {std::pair(&out.master, &shard_.master),
                                      {&out.first_moment, &shard_.first_moment},
                                      {&out.second_moment, &shard_.second_moment}}) {
    std::vector<float> expected(kCount + 9, -1);
    std::copy_n(written->begin() + 1000, kCount, expected.begin() + 7);
    EXPECT_TRUE(*read == expected);
  }
}

}  // namespace
}  // namespace ringleader::checkpoint
