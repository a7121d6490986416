// AdaSpa's masses of the CPU engine against fp64 sums, pair by pair, and what is kept by them.
#include "kernels/reference/gates/mass_gate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "kernels/reference/testing/masked_attention.h"
#include "kernels/reference/testing/packed_documents.h"
#include "kernels/reference/testing/sight.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::reference {
namespace {

using ::testing::ElementsAre;
using testing::RandomTensor;
using testing::Sight;
using testing::Tensor;

constexpr int kHeads = 4, kKvHeads = 2, kDim = 64;
constexpr float kScale = 0.4f;  // logits far apart

class BlockMassTest : public ::testing::Test {
 protected:
  void Draw(int64_t tokens, int tile, bool packed, Sight::Mask mask = Sight::Mask::kCausal) {
    tile_ = tile;
    q_ = RandomTensor(tokens, kHeads, kDim, random_);
    k_ = RandomTensor(tokens, kKvHeads, kDim, random_);
    sight_ =
        Sight(mask, tokens,
              packed ? testing::RandomDocuments(tokens, tile, random_) : std::vector<int64_t>());
  }
  int64_t tokens() const { return q_.tokens; }
  int64_t blocks() const { return (tokens() + tile_ - 1) / tile_; }

  // Of one rank's queries.
  std::vector<int32_t> Find(const ShardLayout& layout) {
    const Tensor local = testing::Shard(q_, layout);
    const testing::RankSight mine = sight_.Of(layout);
    std::vector<int32_t> mass(kHeads * ((local.tokens + tile_ - 1) / tile_) * blocks());
    BlockMass(engine_, local.view(), std::as_const(k_).view(),
              {.query_layout = layout,
               .seen = mine.seen(),
               .tile = tile_,
               .scale = kScale,
               .mass = mass.data()});
    return mass;
  }

  // exp(logit) of a pair, 0 if it is hidden.
  double Weight(int head, int64_t query, int64_t key) const {
    if (!sight_.Sees(query, key)) return 0.0;
    double logit = 0.0;
    for (int x = 0; x < kDim; ++x) {
      logit += double{q_.at(query, head, x)} * double{k_.at(key, head / (kHeads / kKvHeads), x)};
    }
    return std::exp(logit * double{kScale});
  }

  std::mt19937 random_{11};
  Engine engine_{2};
  int tile_ = 64;
  Tensor q_{0, kHeads, kDim}, k_{0, kKvHeads, kDim};
  Sight sight_{Sight::Mask::kCausal, 0};
};

TEST_F(BlockMassTest, IsThatOfTheExactSoftmax) {
  for (const auto& [count, tile] : {std::pair{500, 64}, {512, 128}, {40, 64}}) {
    for (int trial = 0; trial < 8; ++trial) {
      SCOPED_TRACE(::testing::Message() << count << " tokens, tile " << tile << " "
                                        << Sight::kNames[trial / 2] << trial % 2);
      Draw(count, tile, /*packed=*/trial % 2 == 1, Sight::kMasks[trial / 2]);
      for (int64_t query = 3; query < tokens(); query += 7) {
        std::fill_n(&q_.at(query, 0, 0), kHeads * kDim, std::numeric_limits<float>::quiet_NaN());
      }
      const std::vector<int32_t> found = Find({.tokens = tokens()});
      for (int head = 0; head < kHeads; ++head) {
        std::vector<double> want(blocks() * blocks(), 0.0);
        for (int64_t query = 0; query < tokens(); ++query) {
          if (query % 7 == 3) continue;  // what is no number has no mass
          double sum = 0.0;
          for (int64_t key = 0; key < tokens(); ++key) sum += Weight(head, query, key);
          for (int64_t key = 0; key < tokens(); ++key) {
            want[query / tile * blocks() + key / tile] += Weight(head, query, key) / sum;
          }
        }
        for (int64_t i = 0; i < blocks() * blocks(); ++i) {
          ASSERT_NEAR(found[head * blocks() * blocks() + i], std::ldexp(want[i], kMassBits),
                      1.0 + 2e-5 * std::ldexp(want[i], kMassBits))
              << head << " " << i;
        }
      }
    }
  }
}

// A rank's rows are the sequence's, bit for bit.
TEST_F(BlockMassTest, IsTheSameOnAnyRank) {
  for (const Sight::Mask mask : Sight::kMasks) {
    Draw(1024, 64, /*packed=*/true, mask);
    const std::vector<int32_t> whole = Find({.tokens = tokens()});
    for (int trial = 0; trial < 12; ++trial) {
      const ShardLayout layout = {.kind = static_cast<LayoutKind>(trial / 4),
                                  .ranks = 4,
                                  .rank = trial % 4,
                                  .stripe = 64,
                                  .tokens = tokens()};
      const std::vector<int32_t> found = Find(layout);
      const int64_t tiles = layout.local_tokens() / tile_;
      for (int64_t i = 0; i < kHeads * tiles * blocks(); ++i) {
        const int64_t row = i / blocks(), tile = layout.Position(row % tiles * tile_) / tile_;
        ASSERT_EQ(found[i], whole[(row / tiles * blocks() + tile) * blocks() + i % blocks()]);
      }
    }
  }
}

TEST_F(BlockMassTest, WhatIsNoNumberHasNoMass) {
  Draw(256, 64, /*packed=*/false);
  const std::vector<int32_t> whole = Find({.tokens = tokens()});
  q_.at(130, 0, 5) = NAN;
  const std::vector<int32_t> found = Find({.tokens = tokens()});
  int64_t missing = 0;
  for (int64_t i = 0; i < std::ssize(found); ++i) {
    missing += whole[i] - found[i];
    if (i / blocks() == 2) {  // head 0, the tile of query 130, whose others have theirs
      EXPECT_LE(found[i], whole[i]) << i;
      EXPECT_EQ(found[i] > 0, i % blocks() <= 2) << i;
    } else {
      EXPECT_EQ(found[i], whole[i]) << i;
    }
  }
  EXPECT_NEAR(static_cast<double>(missing), std::ldexp(1.0, kMassBits), 4);
}

// Few masses, so that many are equal, in two documents; none of what no query of a tile sees.
class KeptMassTest : public BlockMassTest, public ::testing::WithParamInterface<Sight::Mask> {};

TEST_P(KeptMassTest, TheShareOfLargestMassIsKept) {
  constexpr int64_t kTiles = 40;
  const int64_t words = BlockWords(kTiles);
  const Sight sight(GetParam(), kTiles * 64, {0, int64_t{17} * 64});
  const testing::RankSight whole = sight.Of({.tokens = kTiles * 64});
  const auto is_seen = [&](int64_t tile, int64_t block) {
    return sight.Meets(tile * 64, tile * 64 + 63, block, 64);
  };
  std::vector<int32_t> mass(2 * kTiles * kTiles);
  for (int64_t i = 0; i < std::ssize(mass); ++i) {
    if (is_seen(i / kTiles % kTiles, i % kTiles)) mass[i] = static_cast<int32_t>(random_() % 5);
  }
  const std::vector<float> density = {0.3f, 0.15f};
  std::vector<uint32_t> chosen(2 * kTiles * words, ~0u);
  std::vector<int64_t> kept(2, -1), total(2, -1);
  SelectBlocksByMass(engine_, {.mass = mass.data(),
                               .query_layout = {.tokens = kTiles * 64},
                               .seen = whole.seen(),
                               .heads = 2,
                               .tile = 64,
                               .density = density.data(),
                               .chosen = chosen.data(),
                               .kept = kept.data(),
                               .total = total.data()});
  for (int head = 0; head < 2; ++head) {
    int64_t want_kept = 0, want_total = 0;
    for (int own = 0; own < kTiles; ++own) {
      const int64_t row = head * kTiles + own;
      std::vector<std::pair<int, int>> order;  // the largest mass first, then as ties go
      for (int block = 0; block < kTiles; ++block) {
        if (block == own || !is_seen(own, block)) continue;
        order.emplace_back(-mass[row * kTiles + block], head == 0 ? block : -block);
      }
      std::ranges::sort(order);
      std::set<int> want = {own};
      const auto most = static_cast<size_t>(
          std::ceil((head == 0 ? 0.3 : 0.15) * static_cast<double>(order.size()) - 1e-6));
      for (size_t i = 0; i < std::min(most, order.size()); ++i) {
        want.insert(std::abs(order[i].second));
      }
      for (int block = 0; block < words * 32; ++block) {
        ASSERT_EQ(chosen[row * words + block / 32] >> block % 32 & 1, want.contains(block))
            << head << " " << own << " " << block;
      }
      for (const int block : want) want_kept += mass[row * kTiles + block];
      for (int block = 0; block < kTiles; ++block) want_total += mass[row * kTiles + block];
    }
    EXPECT_EQ(kept[head], want_kept);
    EXPECT_EQ(total[head], want_total);
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, KeptMassTest, ::testing::ValuesIn(Sight::kMasks));

TEST_F(BlockMassTest, HeadsOfLowRecallGetWhatHeadsOfHighRecallGive) {
  const std::vector<int64_t> kept = {95, 30, 90, 50, 85, 85, 10}, total(7, 100);
  std::vector<float> density(7);
  AdaptDensityStep step = {.kept = kept.data(),
                           .total = total.data(),
                           .heads = 7,
                           .density = 0.5f,
                           .threshold = 0.8f,
                           .head_density = density.data()};
  // Four exceed 0.8, of which half of seven, three, give to three.
  AdaptDensity(step);
  EXPECT_THAT(density, ElementsAre(0.25f, 0.75f, 0.25f, 0.75f, 0.25f, 0.5f, 0.75f));
  step.threshold = 0.94f;
  AdaptDensity(step);
  EXPECT_THAT(density, ElementsAre(0.25f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.75f));
  step.threshold = 0.96f;  // none exceeds it
  AdaptDensity(step);
  EXPECT_THAT(density, ::testing::Each(0.5f));
}

}  // namespace
}  // namespace ringleader::kernels::reference
