// XAttention's choice of the CPU engine against the fp64 oracle.
#include "kernels/reference/gates/antidiagonal_gate.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/reference/testing/antidiagonal_oracle.h"
#include "kernels/reference/testing/masked_attention.h"
#include "kernels/reference/testing/packed_documents.h"
#include "kernels/reference/testing/sight.h"

namespace ringleader::kernels::reference {
namespace {

using testing::AntidiagonalLogits;
using testing::AntidiagonalOracle;
using testing::RandomTensor;
using testing::Sight;
using testing::Tensor;

// fp32 logits, and masses in units of 2^-22.
constexpr double kTolerance = 1e-5;

struct Choice {
  std::vector<uint32_t> bits;
  int64_t kept = 0;
};

Choice Choose(const Tensor& q, const Tensor& k, AntidiagonalGateStep step,
              const ShardLayout& layout, const Sight& sight) {
  const Tensor local = testing::Shard(q, layout);
  const testing::RankSight mine = sight.Of(layout);
  const int64_t tiles = (local.tokens + step.tile - 1) / step.tile,
                blocks = (q.tokens + step.tile - 1) / step.tile;
  Choice choice;
  choice.bits.resize(q.heads * tiles * BlockWords(static_cast<int32_t>(blocks)));
  step.query_layout = layout;
  step.seen = mine.seen();
  step.chosen = choice.bits.data();
  Engine engine(2);
  ChooseByAntidiagonals(engine, local.view(), k.view(), step);
  for (const uint32_t word : choice.bits) choice.kept += std::popcount(word);
  return choice;
}

TEST(AntidiagonalGateTest, IsTheOracles) {
  std::mt19937 random(3);
  for (const auto& [tokens, tile, stride] :
       {std::tuple{1000, 64, 16}, {1024, 128, 16}, {1024, 128, 8}, {520, 64, 64}, {40, 64, 64}}) {
    const Tensor q = RandomTensor(tokens, 4, 64, random), k = RandomTensor(tokens, 2, 64, random);
    const AntidiagonalLogits logits(q.view(), k.view(), stride);
    const std::vector<int64_t> documents = testing::RandomDocuments(tokens, tile, random);
    for (int trial = 0; trial < 8; ++trial) {
      const bool packed = trial % 2 == 1;
      const auto mask = Sight::kMasks[trial / 2];
      const Sight sight(mask, tokens, packed ? documents : std::vector<int64_t>());
      for (const auto& [threshold, density] :
           {std::pair{0.9f, 0.0f}, {0.3f, 0.0f}, {1.0f, 0.0f}, {0.5f, 0.3f}, {1.0f, 0.3f}}) {
        SCOPED_TRACE(::testing::Message()
                     << tokens << " tokens, tile " << tile << ", stride " << stride
                     << ", threshold " << threshold << ", density " << density
                     << (packed ? ", documents, " : ", ") << Sight::kNames[trial / 2]);
        const AntidiagonalGateStep step = {.tile = tile,
                                           .stride = stride,
                                           .scale = 1.0f,  // logits far apart
                                           .threshold = threshold,
                                           .density = density};
        const AntidiagonalOracle oracle(logits, step, sight);
        const ShardLayout whole = {.tokens = tokens};
        EXPECT_EQ(oracle.Complaint(Choose(q, k, step, whole, sight).bits.data(), whole, kTolerance),
                  "");
      }
    }
  }
}

TEST(AntidiagonalGateTest, KeepsMoreForMoreMassAndNoMoreThanTheShare) {
  std::mt19937 random(5);
  const Tensor q = RandomTensor(2048, 2, 64, random), k = RandomTensor(2048, 1, 64, random);
  const ShardLayout whole = {.tokens = 2048};
  const Sight causal(Sight::Mask::kCausal, 2048);
  AntidiagonalGateStep step = {.tile = 64, .stride = 16, .scale = 1.0f};
  int64_t before = 0;
  for (const float threshold : {0.1f, 0.5f, 0.9f, 1.0f}) {
    step.threshold = threshold;
    const int64_t kept = Choose(q, k, step, whole, causal).kept;
    EXPECT_GT(kept, before) << threshold;
    before = kept;
  }
  EXPECT_EQ(before, 2 * 32 * 33 / 2);
  step.density = 0.25f;
  // A row's share is rounded down, but for what is always kept.
  int64_t most = 0;
  for (int seen = 1; seen <= 32; ++seen) most += std::max(std::min(seen, 2), seen / 4);
  EXPECT_EQ(Choose(q, k, step, whole, causal).kept, 2 * most);
}

// Heads have budgets of their own, of what the share leaves besides the blocks that are always
// kept.
TEST(AntidiagonalGateTest, HeadsKeepTheirHalvesOfTheShare) {
  std::mt19937 random(15);
  constexpr int64_t kTokens = 2048;
  const Tensor q = RandomTensor(kTokens, 4, 64, random), k = RandomTensor(kTokens, 2, 64, random);
  const AntidiagonalLogits logits(q.view(), k.view(), 16);
  const std::vector<int64_t> documents = testing::RandomDocuments(kTokens, 64, random);
  const std::vector<int32_t> halves = {3, 1, 2, 1};
  const ShardLayout whole = {.tokens = kTokens};
  for (const Sight::Mask mask : Sight::kMasks) {
    for (const std::vector<int64_t>& firsts : {std::vector<int64_t>(), documents}) {
      const Sight sight(mask, kTokens, firsts);
      for (const auto& [threshold, density] :
           {std::pair{1.0f, 0.1f}, {1.0f, 0.3f}, {1.0f, 2.0f / 3.0f}, {0.5f, 0.3f}, {1.0f, 0.0f}}) {
        SCOPED_TRACE(::testing::Message()
                     << "mask " << static_cast<int>(mask) << ", threshold " << threshold
                     << ", density " << density << (firsts.empty() ? "" : ", documents"));
        const AntidiagonalGateStep step = {.tile = 64,
                                           .stride = 16,
                                           .scale = 1.0f,
                                           .threshold = threshold,
                                           .density = density,
                                           .head_halves = halves.data()};
        const AntidiagonalOracle oracle(logits, step, sight);
        EXPECT_EQ(oracle.Complaint(Choose(q, k, step, whole, sight).bits.data(), whole, kTolerance),
                  "");
      }
    }
  }
}

// What is given to one head another gives: all keep as many blocks together, where all have mass.
TEST(AntidiagonalGateTest, HalvesOfTheShareKeepTheMean) {
  std::mt19937 random(17);
  const Tensor q = RandomTensor(2048, 2, 64, random), k = RandomTensor(2048, 1, 64, random);
  const Sight causal(Sight::Mask::kCausal, 2048);
  for (const float density : {0.2f, 0.25f, 0.4f, 2.0f / 3.0f}) {
    AntidiagonalGateStep step = {
        .tile = 64, .stride = 16, .scale = 1.0f, .threshold = 1.0f, .density = density};
    const auto of_heads = [&](const std::vector<int32_t>& halves) {
      step.head_halves = halves.empty() ? nullptr : halves.data();
      const std::vector<uint32_t> bits = Choose(q, k, step, {.tokens = 2048}, causal).bits;
      std::vector<int> kept(2);
      for (size_t row = 0; row < bits.size(); ++row) kept[row / 32] += std::popcount(bits[row]);
      return kept;
    };
    const std::vector<int> equal = of_heads({}), moved = of_heads({1, 3});
    EXPECT_EQ(of_heads({2, 2}), equal);
    EXPECT_EQ(moved[0] + moved[1], equal[0] + equal[1]) << density;
    EXPECT_LT(moved[0], equal[0]) << density;
  }
}

TEST(AntidiagonalGateTest, RanksChooseAsOneDoes) {
  std::mt19937 random(7);
  const Tensor q = RandomTensor(1024, 2, 64, random), k = RandomTensor(1024, 1, 64, random);
  const std::vector<int32_t> halves = {1, 3};
  const AntidiagonalGateStep step = {
      .tile = 64, .stride = 16, .scale = 1.0f, .threshold = 0.5f, .head_halves = halves.data()};
  for (const Sight::Mask mask : Sight::kMasks) {
    const Sight sight(mask, 1024, {0, 130, 700});
    const std::vector<uint32_t> one = Choose(q, k, step, {.tokens = 1024}, sight).bits;
    for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      for (int rank = 0; rank < 4; ++rank) {
        const ShardLayout layout = {
            .kind = kind, .ranks = 4, .rank = rank, .stripe = 128, .tokens = 1024};
        const std::vector<uint32_t> bits = Choose(q, k, step, layout, sight).bits;
        for (int64_t row = 0; row < 8; ++row) {
          EXPECT_EQ(bits[row], one[row / 4 * 16 + layout.Position(row % 4 * 64) / 64]) << row;
        }
      }
    }
  }
}

// A key that the 20th query of tile 10 looks for lies in block 3: its group's antidiagonal finds
// it.
TEST(AntidiagonalGateTest, FindsAKeyThatOneQueryLooksFor) {
  Tensor q(1024, 1, 64), k(1024, 1, 64);
  q.at(10 * 64 + 20, 0, 5) = 30.0f;
  k.at(3 * 64 + 32 + 11, 0, 5) = 30.0f;  // 20 is 4 in its group: it meets the 12th key of groups
  const auto bits = Choose(q, k, {.tile = 64, .stride = 16, .scale = 1.0f, .threshold = 0.3f},
                           {.tokens = 1024}, Sight(Sight::Mask::kCausal, 1024));
  EXPECT_EQ(bits.bits[10], 1u | 1u << 3 | 1u << 10);
}

// What is not a number has no mass, and takes nothing from the others.
TEST(AntidiagonalGateTest, NotANumberIsNotKept) {
  std::mt19937 random(9);
  const Tensor k = RandomTensor(512, 1, 64, random);
  Tensor q = RandomTensor(512, 1, 64, random);
  for (int64_t i = 448; i < 512; ++i) q.at(i, 0, 0) = NAN;
  const Choice choice = Choose(q, k, {.tile = 64, .stride = 16, .scale = 1.0f, .threshold = 1.0f},
                               {.tokens = 512}, Sight(Sight::Mask::kCausal, 512));
  EXPECT_EQ(choice.bits[7], 1u | 1u << 7);
  EXPECT_EQ(choice.bits[6], 0x7fu);
}

}  // namespace
}  // namespace ringleader::kernels::reference
