#include "ring/head_shares.h"

#include <gtest/gtest.h>

#include <string>

namespace ringleader::ring {
namespace {

TEST(HeadSharesTest, EveryRankHasItsHeadsAndTheirKvHeads) {
  EXPECT_EQ((HeadShares{.ranks = 4, .heads = 16, .kv_heads = 8}.local_heads()), 4);
  EXPECT_EQ((HeadShares{.ranks = 4, .heads = 16, .kv_heads = 8}.local_kv_heads()), 2);
  EXPECT_EQ((HeadShares{.ranks = 8, .heads = 16, .kv_heads = 2}.local_kv_heads()), 1);
}

// The volumes that LongCA-bench states for Ulysses (arXiv 2510.17896, appendix), in elements that a
// device sends, of t tokens over N ranks: 2 (N - 1) / N² × t × (kv heads + heads) × head_dim.
TEST(HeadSharesTest, VolumesAreThoseThatArePublished) {
  constexpr int64_t kTokens = 65536, kDim = 128;
  for (const int64_t n : {1, 2, 4, 8}) {
    const HeadShares shares{.ranks = static_cast<int>(n), .heads = 64, .kv_heads = 8};
    EXPECT_EQ(shares.ForwardValues(kTokens / n, kDim),
              2 * (n - 1) * kTokens * (8 + 64) * kDim / (n * n))
        << n;
  }
  // Of USP each of the ring's N_p ranks is N_a: t / N_p takes the place of t.
  const HeadShares shares{.ranks = 4, .heads = 64, .kv_heads = 8};
  EXPECT_EQ(shares.ForwardValues(kTokens / 8, kDim),
            int64_t{2} * 3 * (kTokens / 2) * 72 * kDim / 16);
  EXPECT_EQ(shares.BackwardValues(kTokens / 8, kDim), 2 * shares.ForwardValues(kTokens / 8, kDim));
  // Where ranks have the same KV head, it is sent to each of them: as if there were one for each.
  const HeadShares few{.ranks = 4, .heads = 64, .kv_heads = 2};
  EXPECT_EQ(few.ForwardValues(kTokens / 4, kDim), int64_t{2} * 3 * kTokens * (4 + 64) * kDim / 16);
}

TEST(HeadSharesTest, ErrorsSayWhatDivides) {
  EXPECT_TRUE(CheckHeadShares({.ranks = 8, .heads = 16, .kv_heads = 2}).ok());
  EXPECT_TRUE(CheckHeadShares({.ranks = 7, .heads = 28, .kv_heads = 7}).ok());
  const auto message = [](const HeadShares& shares) {
    return std::string(CheckHeadShares(shares).message());
  };
  EXPECT_EQ(message({.ranks = 8, .heads = 28, .kv_heads = 4}),
            "parallelism.heads: 8 trainers cannot share out 28 heads over 4 KV heads evenly; give "
            "one of 1, 2, 4, 28");
  EXPECT_EQ(message({.ranks = 6, .heads = 12, .kv_heads = 4}),
            "parallelism.heads: 6 trainers cannot share out 12 heads over 4 KV heads evenly; give "
            "one of 1, 2, 4, 12");
  EXPECT_EQ(message({.ranks = 0, .heads = 4, .kv_heads = 2}),
            "parallelism.heads: 0 trainers cannot share out 4 heads over 2 KV heads evenly; give "
            "one of 1, 2, 4");
}

}  // namespace
}  // namespace ringleader::ring
