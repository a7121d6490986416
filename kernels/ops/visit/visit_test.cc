// Which choices GPUs gather queries for, and with how much room. What they compute so is compared
// with the definition in python/tests/choices_test.py, on a GPU.
#include "kernels/ops/visit/visit.h"

#include <gtest/gtest.h>

#include <vector>

#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::ops {
namespace {

using torch::Tensor;

constexpr int64_t kTile = 128, kBlock = 1024;

// A choice of blocks in which no query chose anything: what Rows() looks at is how much they may.
class RowsTest : public testing::Test {
 protected:
  explicit RowsTest(int64_t tokens = 16384)
      : q_(torch::zeros({1, 4, tokens, 64})),
        sizes_(SizesOf(q_, torch::zeros({1, 2, tokens, 64}))) {
    const auto ints = torch::TensorOptions().dtype(torch::kInt);
    const Tensor offsets = torch::zeros({1, 4, sizes_.Tiles(kTile) + 1}, ints),
                 listed = torch::zeros({1}, ints);
    lists_ = {offsets, listed, offsets, listed,
              torch::zeros({1, 4, sizes_.Tiles(kBlock), QueryWords(tokens)}, ints)};
  }

  std::optional<QueryRowsPlan> RowsOf(const KeptBlocks& kept, bool documents = false,
                                      bool intervals = false) const {
    const auto ints = torch::TensorOptions().dtype(torch::kInt);
    const auto optional = [&](bool is_there, const std::vector<int64_t>& sizes) {
      return is_there ? std::optional<Tensor>(torch::zeros(sizes, ints)) : std::nullopt;
    };
    return Visit(q_, sizes_, static_cast<int64_t>(TilePattern::kCsr), lists_,
                 optional(documents, {1, sizes_.tokens}),
                 optional(intervals, {1, sizes_.tokens, 4}), kTile, kBlock, kept)
        .Rows();
  }

  const Tensor q_;
  const AttentionSizes sizes_;
  std::vector<Tensor> lists_;
};

class LongRowsTest : public RowsTest {
 protected:
  LongRowsTest() : RowsTest(32768) {}
};

TEST_F(RowsTest, HaveRoomForWhatQueriesKeepAtMost) {
  // Of 16 blocks queries of the first see one, their own, and later ones keep two more.
  const auto plan = RowsOf({.topk_blocks = 3});
  ASSERT_TRUE(plan.has_value());
  const int64_t most = kBlock * (0 + 1 + 14 * 2);
  EXPECT_GE(plan->capacity, most);
  EXPECT_LE(plan->capacity, most + 17 * kTile);
  EXPECT_EQ(plan->heads, 2) << "those of a KV head";
  const auto share = RowsOf({.topk_blocks = 16, .density = 0.25});
  ASSERT_TRUE(share.has_value());
  EXPECT_LT(share->capacity, plan->capacity) << "a density stands above a number";
}

TEST_F(RowsTest, AreNotMadeWhereTilesAreBetterVisitedWhole) {
  EXPECT_FALSE(RowsOf({}).has_value()) << "how many they chose is not known";
  EXPECT_FALSE(RowsOf({.topk_blocks = 3}, /*documents=*/false, /*intervals=*/true).has_value());
  EXPECT_FALSE(RowsOf({.topk_blocks = 3}, /*documents=*/true).has_value()) << "short";
  EXPECT_FALSE(RowsOf({.topk_blocks = 1}).has_value()) << "their own blocks alone";
  for (const int64_t all : {int64_t{16}, int64_t{1} << 31, int64_t{1} << 32, INT64_MAX}) {
    EXPECT_FALSE(RowsOf({.topk_blocks = all}).has_value()) << all;
  }
}

TEST_F(LongRowsTest, AreOfOneHeadWithDocuments) {
  const auto plan = RowsOf({.topk_blocks = 3}, /*documents=*/true);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->heads, 1);
}

}  // namespace
}  // namespace ringleader::kernels::ops
