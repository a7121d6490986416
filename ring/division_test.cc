#include "ring/division.h"

#include <gtest/gtest.h>

namespace ringleader::ring {
namespace {

using kernels::LayoutKind;

TEST(DivisionTest, MultiplesByLayout) {
  EXPECT_EQ((Division{.layout = LayoutKind::kContiguous, .ranks = 4, .tile = 64}.Multiple()), 256);
  EXPECT_EQ((Division{.layout = LayoutKind::kZigzag, .ranks = 4, .tile = 64}.Multiple()), 512);
  const Division striped{.layout = LayoutKind::kStriped, .ranks = 4, .tile = 64, .stripe = 192};
  EXPECT_EQ(striped.Multiple(), 768);
  EXPECT_EQ((Division{.layout = LayoutKind::kStriped, .ranks = 4, .tile = 64}.Multiple()), 256);
  EXPECT_EQ((Division{.layout = LayoutKind::kZigzag, .tile = 64}.Multiple()), 1) << "one rank";
}

TEST(DivisionTest, RanksThatShareHeadsHoldAsManyTokensEach) {
  Division division{.layout = LayoutKind::kContiguous, .ranks = 2, .tile = 64, .heads = 4};
  EXPECT_EQ(division.Multiple(), 128) << "a shard of tiles divides by four";
  division.heads = 3;
  EXPECT_EQ(division.Multiple(), 384);
  EXPECT_EQ(CheckDivides("data.sequence_length", 1000, division).message(),
            "data.sequence_length: 1000 does not divide by context / heads × tile = 2 × 64 and by "
            "context = 6, together by 384 (parallelism.layout: contiguous); give 768 or 1152");
  division.ranks = 1;
  EXPECT_EQ(division.Multiple(), 3) << "without a ring any length does that divides";
  EXPECT_EQ(CheckDivides("data.sequence_length", 100, division).message(),
            "data.sequence_length: 100 does not divide by parallelism.heads = 3 "
            "(parallelism.layout: contiguous); give 99 or 102");
}

TEST(DivisionTest, ErrorsNameFieldRuleAndWhatDivides) {
  const Division zigzag{.layout = LayoutKind::kZigzag, .ranks = 4, .tile = 64};
  EXPECT_TRUE(CheckDivides("data.sequence_length", 1024, zigzag).ok());
  EXPECT_EQ(CheckDivides("data.sequence_length", 1000, zigzag).message(),
            "data.sequence_length: 1000 does not divide by 2 × context × tile = 2 × 4 × 64 = 512 "
            "(parallelism.layout: zigzag); give 512 or 1024");
  EXPECT_EQ(CheckDivides("data.sequence_length", 100, {.ranks = 4, .tile = 64}).message(),
            "data.sequence_length: 100 does not divide by context × tile = 4 × 64 = 256 "
            "(parallelism.layout: auto); give 256");
  Division striped{.layout = LayoutKind::kStriped, .ranks = 4, .tile = 64, .stripe = 192};
  EXPECT_EQ(CheckDivides("data.sequence_length", 800, striped).message(),
            "data.sequence_length: 800 does not divide by context × stripe = 4 × 192 = 768 "
            "(parallelism.layout: striped); give 768 or 1536");
  striped.by_documents = true;
  striped.stripe = 0;
  EXPECT_EQ(CheckDivides("data.sequence_length", 800, striped).message(),
            "data.sequence_length: 800 does not divide by context × tile = 4 × 64 = 256 "
            "(parallelism.layout: documents); give 768 or 1024");
}

}  // namespace
}  // namespace ringleader::ring
