// Masks against their slices, which an oracle of its own enumerates.
#include "kernels/masks/masks.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/masks/testing/slices.h"

namespace ringleader::kernels {
namespace {

using testing::CountPairs;
using testing::Slice;
using testing::SlicesOf;

std::vector<int32_t> RandomFirsts(int32_t tokens, std::mt19937& random) {
  std::vector<int32_t> firsts;
  for (int32_t first = 0; first < tokens; first += 1 + static_cast<int32_t>(random() % 90)) {
    firsts.push_back(first);
  }
  return firsts;
}

class MasksTest : public ::testing::TestWithParam<MaskKind> {
 protected:
  void ExpectEqualsSlices(const Mask& mask, int32_t tokens, const std::vector<int32_t>& firsts) {
    SCOPED_TRACE(::testing::Message()
                 << tokens << " tokens, window " << mask.window << ", prefix " << mask.prefix
                 << ", block " << mask.block << ", " << firsts.size() << " documents");
    const auto rows = IntervalsOf(mask, tokens, firsts);
    ASSERT_TRUE(rows.ok()) << rows.status();
    const std::vector<Slice> slices = SlicesOf(mask, tokens, firsts);
    const std::vector<int> counts = CountPairs(slices, tokens);
    for (int32_t i = 0; i < tokens; ++i) {
      const KeyIntervals& row = (*rows)[i];
      ASSERT_TRUE(0 <= row.begin && row.begin <= row.end && row.end <= row.second_begin &&
                  row.second_begin <= row.second_end && row.second_end <= tokens)
          << "query " << i;
      for (int32_t j = 0; j < tokens; ++j) {
        const bool visible =
            (row.begin <= j && j < row.end) || (row.second_begin <= j && j < row.second_end);
        ASSERT_EQ(visible, counts[int64_t{i} * tokens + j]) << "query " << i << ", key " << j;
      }
    }
    const int64_t counted = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    int64_t area = 0;
    for (const Slice& slice : slices) area += slice.Area();
    EXPECT_EQ(area, counted);
    EXPECT_EQ(VisiblePairs(*rows), counted);
  }
};

TEST_P(MasksTest, EqualTheirSlices) {
  const unsigned seed = std::random_device{}();
  RecordProperty("seed", static_cast<int>(seed));
  std::mt19937 random(seed);
  for (int run = 0; run < 6; ++run) {
    const int32_t tokens = 1 + static_cast<int32_t>(random() % 400);
    const auto below = [&](int32_t bound) { return static_cast<int32_t>(random() % bound); };
    const Mask mask = {.kind = GetParam(),
                       .window = 1 + below(tokens + 20),
                       .prefix = below(tokens + 20),
                       .block = 1 + below(60)};
    ASSERT_NO_FATAL_FAILURE(ExpectEqualsSlices(mask, tokens, {0}));
    ASSERT_NO_FATAL_FAILURE(ExpectEqualsSlices(mask, tokens, RandomFirsts(tokens, random)));
  }
}

std::vector<MaskKind> AllKinds() {
  std::vector<MaskKind> kinds;
  for (int kind = 0; kind < kMaskKinds; ++kind) kinds.push_back(static_cast<MaskKind>(kind));
  return kinds;
}
INSTANTIATE_TEST_SUITE_P(Kinds, MasksTest, ::testing::ValuesIn(AllKinds()),
                         [](const auto& info) { return std::string(MaskName(info.param)); });

// Areas of 8 tokens by hand, so that masks and slices cannot be wrong alike.
TEST(MaskAreasTest, OfSmallSequences) {
  const auto pairs = [](const Mask& mask, const std::vector<int32_t>& firsts) {
    return VisiblePairs(*IntervalsOf(mask, 8, firsts));
  };
  const std::vector<int32_t> one = {0}, three = {0, 2, 5};
  EXPECT_EQ(pairs({.kind = MaskKind::kFull}, one), 64);
  EXPECT_EQ(pairs({.kind = MaskKind::kCausal}, one), 36);
  EXPECT_EQ(pairs({.kind = MaskKind::kFullWindow, .window = 2}, one), 22);
  EXPECT_EQ(pairs({.kind = MaskKind::kCausalWindow, .window = 2}, one), 15);
  EXPECT_EQ(pairs({.kind = MaskKind::kFullDocuments}, three), 4 + 9 + 9);
  EXPECT_EQ(pairs({.kind = MaskKind::kCausalDocuments}, three), 3 + 6 + 6);
  // Question and first answer are causal; the second answer sees the question and itself.
  EXPECT_EQ(pairs({.kind = MaskKind::kSharedQuestion}, three), 15 + 3 * 2 + 6);
  EXPECT_EQ(pairs({.kind = MaskKind::kCausalBlockwise}, three), 3 + 6 + 6 + 7 + 8);
  // Two whole rows and two whole columns, and a band of 3 on the other 6 tokens.
  EXPECT_EQ(pairs({.kind = MaskKind::kGlobalSliding, .window = 2}, one), 28 + 16);
  EXPECT_EQ(pairs({.kind = MaskKind::kPrefixCausal, .prefix = 3}, one), 36 + 3);
  EXPECT_EQ(pairs({.kind = MaskKind::kPrefixDocuments, .prefix = 2}, three), 4 + 7 + 7);
  EXPECT_EQ(pairs({.kind = MaskKind::kBlockCausalDocuments, .block = 2}, three), 4 + 7 + 7);
}

TEST(MaskArgumentsTest, WrongOnesAreRefused) {
  const auto message = [](const Mask& mask, const std::vector<int32_t>& firsts) {
    return std::string(IntervalsOf(mask, 8, firsts).status().message());
  };
  EXPECT_NE(message({.kind = static_cast<MaskKind>(12)}, {0}).find("mask.kind is 12"),
            std::string::npos);
  EXPECT_NE(message({.window = 0}, {0}).find("mask.window is 0"), std::string::npos);
  EXPECT_NE(message({.block = -1}, {0}).find("block -1"), std::string::npos);
  EXPECT_NE(message({.prefix = -1}, {0}).find("prefix -1"), std::string::npos);
  EXPECT_NE(message({}, {1}).find("documents[0] is 1"), std::string::npos);
  EXPECT_NE(message({}, {0, 3, 3}).find("documents[2] is 3"), std::string::npos);
  EXPECT_NE(message({}, {0, 8}).find("documents[1] is 8"), std::string::npos);
}

}  // namespace
}  // namespace ringleader::kernels
