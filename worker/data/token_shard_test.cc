#include "worker/data/token_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>

#include "worker/data/pack/pack_folder.h"
#include "worker/data/testing/packed_text.h"
#include "worker/data/token_folder.h"

namespace ringleader::data {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

using TokenShardTest = testing::PackedTextTest;

// `cp new old` writes into the file that is mapped; a file renamed over it does not.
TEST_F(TokenShardTest, OneThatIsWrittenIntoIsNoticed) {
  AddText("a", std::string(5000, 'a'));
  ASSERT_TRUE(Pack(Options()).ok());
  const auto folder = TokenFolder::Open(Train());
  ASSERT_TRUE(folder.ok()) << folder.status();
  const fs::path shard = fs::path(Train()) / folder->manifest().shards[0];
  EXPECT_TRUE(folder->CheckUnchanged().ok());
  const auto later = fs::last_write_time(shard) + std::chrono::seconds(5);
  fs::last_write_time(shard, later);
  EXPECT_TRUE(folder->CheckUnchanged().ok()) << "touched";

  const auto write_into = [&](char text) {
    std::fstream file(shard, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(1000);
    file.put(text);
    file.close();
    fs::last_write_time(shard, later + std::chrono::seconds(text));
  };
  write_into('b');
  const absl::Status changed = folder->CheckUnchanged();
  EXPECT_EQ(changed.code(), absl::StatusCode::kDataLoss) << changed;
  EXPECT_THAT(std::string(changed.message()), HasSubstr(shard.string() + " was written into"));
  write_into('a');
  EXPECT_TRUE(folder->CheckUnchanged().ok()) << "as it was";

  fs::copy(shard, shard.string() + ".new");
  fs::rename(shard.string() + ".new", shard);
  write_into('b');
  EXPECT_TRUE(folder->CheckUnchanged().ok()) << "what is mapped is another file";
  fs::remove(shard);
  EXPECT_TRUE(folder->CheckUnchanged().ok());
}

}  // namespace
}  // namespace ringleader::data
