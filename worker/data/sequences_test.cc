// Where sequences begin and end in the stream, and in which order they are trained.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "worker/data/loader.h"
#include "worker/data/testing/packed_text.h"

namespace ringleader::data {
namespace {

using ::testing::HasSubstr;
using SequencesTest = testing::PackedTextTest;

TEST_F(SequencesTest, TheLastTokenOfEachHasALabelBehindIt) {
  AddText("a", std::string(63, 'x'));
  ASSERT_TRUE(Pack(Options()).ok());  // 64 tokens with the separator
  // The last of four pieces of 16 has no token after it, so it is no sequence.
  const auto loader = Loader::Open(Train(), 16, 1, 257);
  ASSERT_TRUE(loader.ok()) << loader.status();
  EXPECT_EQ(loader->sequences(), 3u);
  EXPECT_EQ(testing::ReadOne(*loader, loader->InOrder(2), {.tokens = 16}).labels.back(), 'x');
  EXPECT_EQ(Loader::Open(Train(), 63, 1, 257)->sequences(), 1u);
  EXPECT_THAT(std::string(Loader::Open(Train(), 64, 1, 257).status().message()),
              HasSubstr("holds 64 tokens; one sequence of 64 needs 65"));
  EXPECT_EQ(Loader::Open(Train(), 21, 1, 257)->sequences(), 3u);
}

TEST_F(SequencesTest, AModelOfALargerVocabularyMayTrainOnThem) {
  AddText("a", "text of one sequence");
  ASSERT_TRUE(Pack(Options()).ok());
  EXPECT_TRUE(Loader::Open(Train(), 4, 1, 257).ok());
  EXPECT_TRUE(Loader::Open(Train(), 4, 1, 100'000).ok());
  EXPECT_EQ(Loader::Open(Train(), 4, 1, 256).status().code(), absl::StatusCode::kInvalidArgument);
}

// A checkpoint of an older release goes on with the sequences that it has not seen.
TEST_F(SequencesTest, TheOrderIsTheSameInEveryRelease) {
  for (int i = 0; i < 41; ++i)
    AddText(std::to_string(10 + i), std::string(1, static_cast<char>('A' + i)));
  ASSERT_TRUE(Pack(Options()).ok());  // "A|B|C|": two tokens a document
  const auto loader = Loader::Open(Train(), 4, 7, 257);
  ASSERT_TRUE(loader.ok()) << loader.status();
  ASSERT_EQ(loader->sequences(), 20u);
  std::string order;
  for (uint64_t index = 0; index < 40; ++index) {
    order += static_cast<char>(
        testing::ReadOne(*loader, loader->Shuffled(index), {.tokens = 4}).tokens[0]);
  }
  EXPECT_EQ(order, "CS[YKg_WcEA]MGaOeQUISAMa][QGIWe_gUcOEKCY");
}

}  // namespace
}  // namespace ringleader::data
