// What groups of keys are scored by, against plain implementations: the dimensions, the scales and
// the codes, however many ranks hold the sequence.
#include "kernels/reference/gates/score_dims.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/reference/math/fused.h"
#include "kernels/reference/testing/key_group_oracle.h"
#include "kernels/reference/testing/masked_attention.h"

namespace ringleader::kernels::reference {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using testing::RandomTensor;
using testing::Tensor;

struct Statistics {
  std::vector<int64_t> energy;
  std::vector<float> largest;

  bool operator==(const Statistics&) const = default;
};

// Sums up queries and keys of a sequence of `tokens` tokens.
Statistics Sum(const Tensor& q, const Tensor& k, int64_t tokens, int threads = 2) {
  Engine engine(threads);
  const int64_t values = int64_t{2} * k.heads * k.head_dim;
  Statistics sums{std::vector<int64_t>(values, -1), std::vector<float>(values, -1.0f)};
  SumDimEnergy(engine, q.view(), k.view(),
               {.tokens = tokens,
                .rows = q.tokens,
                .energy = sums.energy.data(),
                .largest = sums.largest.data()});
  return sums;
}

struct Picked {
  std::vector<int32_t> dims;
  std::vector<float> inverses;
};

Picked Pick(const Statistics& sums, int kv_heads) {
  Picked picked{std::vector<int32_t>(kv_heads * kScoreDims, -2), std::vector<float>(2 * kv_heads)};
  PickDims(kv_heads, static_cast<int>(std::ssize(sums.energy)) / (2 * kv_heads),
           {.energy = sums.energy.data(),
            .largest = sums.largest.data(),
            .dims = picked.dims.data(),
            .inverses = picked.inverses.data()});
  return picked;
}

struct Narrowed {
  std::vector<uint8_t> queries, keys;
};

Narrowed Narrow(const Tensor& q, const Tensor& k, const Picked& picked) {
  Engine engine(2);
  Narrowed narrowed{std::vector<uint8_t>(q.tokens * q.heads * kScoreDims, 1),
                    std::vector<uint8_t>(k.tokens * k.heads * kScoreDims, 1)};
  NarrowRows(engine, q.view(), k.view(),
             {.dims = picked.dims.data(),
              .inverses = picked.inverses.data(),
              .queries = narrowed.queries.data(),
              .keys = narrowed.keys.data()});
  return narrowed;
}

// Values whose dimensions differ in size.
Tensor Uneven(int64_t tokens, int heads, int head_dim, std::mt19937& random) {
  Tensor x = RandomTensor(tokens, heads, head_dim, random);
  for (size_t i = 0; i < x.data.size(); ++i) {
    x.data[i] *= std::exp2(static_cast<float>(i * 7 % head_dim % 11) - 5.0f);
  }
  return x;
}

TEST(ScoreDimsTest, AreTheOracles) {
  std::mt19937 random(11);
  for (const int head_dim : {128, 64, 32}) {
    const Tensor q = Uneven(300, 6, head_dim, random), k = Uneven(300, 2, head_dim, random);
    const Picked picked = Pick(Sum(q, k, 300), 2);
    const Narrowed narrowed = Narrow(q, k, picked);
    for (int kv_head = 0; kv_head < 2; ++kv_head) {
      const std::vector<int> dims = testing::PickedDims(q.view(), k.view(), kv_head);
      const auto own = picked.dims.begin() + kv_head * kScoreDims;
      ASSERT_EQ(std::vector<int>(own, own + std::ssize(dims)), dims);
      EXPECT_THAT(std::vector<int>(own + std::ssize(dims), own + kScoreDims), Each(-1));
      const auto expect_rows = [&](const Tensor& x, int first, int end, float inverse,
                                   const std::vector<uint8_t>& codes) {
        const std::vector<double> want = testing::NarrowHeads(x.view(), first, end, dims);
        for (int64_t row = 0; row < (end - first) * x.tokens; ++row) {
          const int64_t head = first + row / x.tokens, i = row % x.tokens;
          for (int64_t dim = 0; dim < kScoreDims; ++dim) {
            const uint8_t code = codes[(i * x.heads + head) * kScoreDims + dim];
            ASSERT_EQ(double{FromE4m3(code)} / inverse,
                      dim < std::ssize(dims) ? want[row * std::ssize(dims) + dim] : 0.0);
          }
        }
      };
      expect_rows(q, kv_head * 3, kv_head * 3 + 3, picked.inverses[kv_head], narrowed.queries);
      expect_rows(k, kv_head, kv_head + 1, picked.inverses[2 + kv_head], narrowed.keys);
    }
  }
}

// Sums and maxima of ranks are those of one, as whole numbers: whoever holds what.
TEST(ScoreDimsTest, RanksAddUpToOne) {
  std::mt19937 random(12);
  const Tensor q = Uneven(512, 4, 128, random), k = Uneven(512, 2, 128, random);
  const Statistics one = Sum(q, k, 512);
  EXPECT_EQ(Sum(q, k, 512, /*threads=*/5), one);
  for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    Statistics all;
    for (int rank = 0; rank < 4; ++rank) {
      const ShardLayout layout = {
          .kind = kind, .ranks = 4, .rank = rank, .stripe = 64, .tokens = 512};
      const Statistics own = Sum(testing::Shard(q, layout), testing::Shard(k, layout), 512);
      if (rank == 0) {
        all = own;
        continue;
      }
      for (size_t i = 0; i < own.energy.size(); ++i) {
        all.energy[i] += own.energy[i];
        all.largest[i] = std::max(all.largest[i], own.largest[i]);
      }
    }
    EXPECT_EQ(all, one);
  }
}

// What comes after the rows that count is padding.
TEST(ScoreDimsTest, PaddingHasNoSay) {
  std::mt19937 random(5);
  Tensor all_q(96, 4, 64), all_k(96, 2, 64);
  for (Tensor* const x : {&all_q, &all_k}) {
    for (float& value : x->data) value = static_cast<float>(random() % 1000) * 0.01f;
  }
  const Tensor &q = all_q, &k = all_k;
  Tensor q_rows(70, 4, 64), k_rows(70, 2, 64);
  std::copy_n(q.data.begin(), q_rows.data.size(), q_rows.data.begin());
  std::copy_n(k.data.begin(), k_rows.data.size(), k_rows.data.begin());
  Engine engine(2);
  Statistics sums{std::vector<int64_t>(2 * 2 * 64), std::vector<float>(2 * 2 * 64)};
  SumDimEnergy(
      engine, q.view(), k.view(),
      {.tokens = 70, .rows = 70, .energy = sums.energy.data(), .largest = sums.largest.data()});
  EXPECT_EQ(sums, Sum(q_rows, k_rows, 70));
}

TEST(ScoreDimsTest, HeadsOfZerosTakeTheFirstDims) {
  const Tensor q(100, 2, 128), k(100, 1, 128);
  const Picked picked = Pick(Sum(q, k, 100), 1);
  for (int i = 0; i < kScoreDims; ++i) EXPECT_EQ(picked.dims[i], i);
  EXPECT_THAT(picked.inverses, ElementsAre(0x1p121f, 0x1p121f));
  EXPECT_THAT(Narrow(q, k, picked).keys, Each(0));
}

// Dimension 100 alone is out of the first 64; its one value, far above the others, sets the scale.
TEST(ScoreDimsTest, OneHugeValueBringsItsDimensionAndSetsTheScale) {
  std::mt19937 random(13);
  Tensor q(64, 1, 128), k(64, 1, 128);
  for (Tensor* const x : {&q, &k}) {
    for (float& value : x->data) value = 1.0f;
  }
  k.at(17, 0, 100) = -0x1.8p60f;
  const Picked picked = Pick(Sum(q, k, 64), 1);
  EXPECT_EQ(picked.dims[62], 62);
  EXPECT_EQ(picked.dims[63], 100);
  EXPECT_EQ(picked.inverses[0], kScoreScaling * 256.0f);
  EXPECT_EQ(picked.inverses[1], kScoreScaling * 0x1p-52f);
  const Narrowed narrowed = Narrow(q, k, picked);
  EXPECT_EQ(FromE4m3(narrowed.keys[17 * kScoreDims + 63]), -12.0f);
  EXPECT_EQ(narrowed.keys[17 * kScoreDims], 0);  // 1 is nothing beside it
  EXPECT_EQ(FromE4m3(narrowed.queries[0]), 8.0f);
}

// Squares that are too large count as the most that 2^30 tokens have room for; what is not finite
// counts as nothing, and makes its row NaN.
TEST(ScoreDimsTest, NothingOverflows) {
  Tensor q(2, 2, 64), k(2, 1, 64);
  for (float& value : q.data) value = 1e30f;
  k.at(0, 0, 5) = INFINITY;
  k.at(1, 0, 6) = NAN;
  k.at(1, 0, 7) = 0x1p-13f;
  constexpr int64_t kTokens = int64_t{1} << 30;
  EXPECT_EQ(MostEnergy(2 * kTokens), 0x1p31f);
  EXPECT_EQ(MostEnergy(3), 0x1p60f);
  const Statistics sums = Sum(q, k, kTokens);
  EXPECT_EQ(sums.energy[0], 4 * (int64_t{1} << 31));
  EXPECT_EQ(sums.energy[64 + 5], 0);
  EXPECT_EQ(sums.energy[64 + 6], 0);
  EXPECT_EQ(sums.energy[64 + 7], 0);  // a quarter of a unit
  EXPECT_EQ(sums.largest[0], 1e30f);
  EXPECT_EQ(sums.largest[64 + 5], 0.0f);
  EXPECT_EQ(sums.largest[64 + 7], 0x1p-13f);
  const Narrowed narrowed = Narrow(q, k, Pick(sums, 1));
  EXPECT_THAT(narrowed.keys, Each(0x7f));
}

}  // namespace
}  // namespace ringleader::kernels::reference
