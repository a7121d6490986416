#include "balance/dealing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "bench/length_distributions.h"

namespace ringleader::balance {
namespace {

using ::testing::ElementsAre;
using Lengths = std::vector<uint64_t>;

// Grows with the square beyond some thousand tokens, as attention does.
SampleWeights Quadratic() {
  std::vector<SampleWeight> rows;
  for (uint64_t tokens = 64; tokens <= (1 << 20); tokens *= 2) {
    const auto n = static_cast<double>(tokens);
    rows.push_back({tokens, n / 1e3 + n * n / 3e7});
  }
  return *SampleWeights::Create(rows);
}

void ExpectEachOnce(const Dealing& dealing, const Lengths& tokens, const DealingRules& rules) {
  std::vector<int> dealt(tokens.size(), 0);
  for (const auto& group : dealing.groups) {
    for (const MicroBatch& batch : group) {
      int64_t sum = 0;
      for (const uint32_t sample : batch.samples) {
        ++dealt.at(sample);
        sum += static_cast<int64_t>(tokens[sample]);
      }
      EXPECT_EQ(batch.tokens, sum);
      EXPECT_LE(batch.padded, rules.capacity);
      EXPECT_EQ(batch.padded % rules.multiple, 0);
      EXPECT_LT(batch.padded - batch.tokens, rules.multiple);
      if (rules.one_sample) {
        EXPECT_EQ(batch.samples.size(), 1u);
      }
    }
  }
  EXPECT_THAT(dealt, ::testing::Each(1));
}

TEST(DealingTest, EverySampleIsDealtOnceIntoMicroBatchesThatHoldIt) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 300; ++i) {
    const DealingRules rules = {.groups = static_cast<int>(1 + random() % 9),
                                .capacity = 4096,
                                .multiple = 128,
                                .one_sample = random() % 2 == 0};
    Lengths tokens(rules.groups + random() % 60);
    for (uint64_t& length : tokens) length = 1 + random() % 4096;
    const Dealing dealing = Deal(tokens, Quadratic(), rules);
    ExpectEachOnce(dealing, tokens, rules);
    ASSERT_EQ(dealing.groups.size(), static_cast<size_t>(rules.groups));
    for (const auto& group : dealing.groups) {
      EXPECT_FALSE(group.empty());
      EXPECT_TRUE(std::is_sorted(group.begin(), group.end(), [](const auto& a, const auto& b) {
        return a.microseconds > b.microseconds;
      }));
    }
  }
}

TEST(DealingTest, ASlowGroupGetsLess) {
  std::mt19937_64 random(4);
  Lengths tokens(400);
  for (uint64_t& length : tokens) length = 256 + random() % 3840;
  DealingRules rules = {.groups = 3, .capacity = 4096, .multiple = 128};
  const Dealing even = Deal(tokens, Quadratic(), rules);
  rules.group_permille = {1000, 500, 1000};
  const Dealing dealing = Deal(tokens, Quadratic(), rules);
  ExpectEachOnce(dealing, tokens, rules);
  const auto tokens_of = [](const std::vector<MicroBatch>& group) {
    double sum = 0;
    for (const MicroBatch& batch : group) sum += static_cast<double>(batch.tokens);
    return sum;
  };
  // 2 : 1 : 2 of what it was.
  EXPECT_NEAR(tokens_of(dealing.groups[1]) / tokens_of(even.groups[1]), 0.6, 0.02);
  EXPECT_NEAR(tokens_of(dealing.groups[0]) / tokens_of(even.groups[0]), 1.2, 0.04);
  EXPECT_LT(dealing.Imbalance(), 1.01) << "at their speeds all end together";
  rules.group_permille = {1000, 1000, 1000};
  EXPECT_EQ(tokens_of(Deal(tokens, Quadratic(), rules).groups[1]), tokens_of(even.groups[1]));
}

// Small numbers, so that sums meet the capacity often.
TEST(DealingTest, AMicroBatchMayBeFullAndNoMore) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 300; ++i) {
    const DealingRules rules = {.groups = static_cast<int>(1 + random() % 3), .capacity = 8};
    Lengths tokens(rules.groups + random() % 20);
    for (uint64_t& length : tokens) length = 1 + random() % 8;
    ExpectEachOnce(Deal(tokens, Quadratic(), rules), tokens, rules);
  }
}

TEST(DealingTest, ShortSamplesShareMicroBatchesAsFewAsHoldThem) {
  const Lengths tokens = {100, 1000, 24, 900, 124};
  const DealingRules rules = {.groups = 1, .capacity = 1024, .multiple = 64};
  const Dealing dealing = Deal(tokens, {}, rules);
  ExpectEachOnce(dealing, tokens, rules);
  EXPECT_EQ(dealing.MicroBatches(), 3u);  // 2,148 tokens do not fit into two
  // 1000, 900 and 124 + 100 + 24: even, as far as they can be.
  EXPECT_EQ(dealing.PaddingTokens(), 24 + 60 + 8);
}

TEST(DealingTest, SwapsImproveOnLongestFirst) {
  const DealingRules rules = {.groups = 2, .capacity = 64};
  // Longest first gives 5 + 3 + 3 and 4 + 4; the optimum is 5 + 4 and 4 + 3 + 3, in this order.
  EXPECT_DOUBLE_EQ(Deal(Lengths{5, 4, 4, 3, 3}, {}, rules).Imbalance(), 10 / 9.5);
}

TEST(DealingTest, IsTheBestOrNearlySoForFewSamples) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 200; ++i) {
    Lengths tokens(8);
    for (uint64_t& length : tokens) length = 1 + random() % 1000;
    uint64_t best = ~uint64_t{0};
    for (uint32_t chosen = 0; chosen < 256; ++chosen) {
      uint64_t load[2] = {0, 0};
      for (int s = 0; s < 8; ++s) load[chosen >> s & 1] += tokens[s];
      best = std::min(best, std::max(load[0], load[1]));
    }
    uint64_t most = 0;
    for (const auto& group : Deal(tokens, {}, {.groups = 2, .capacity = 1024}).groups) {
      uint64_t load = 0;
      for (const MicroBatch& batch : group) load += batch.microseconds;
      most = std::max(most, load);
    }
    EXPECT_LE(static_cast<double>(most), 1.05 * static_cast<double>(best));
  }
}

TEST(DealingTest, IsAFunctionOfWhatItIsGiven) {
  Lengths tokens(200);
  std::mt19937_64 random(3);
  for (uint64_t& length : tokens) length = 1 + random() % 4096;
  const DealingRules rules = {.groups = 8, .capacity = 8192, .multiple = 64};
  const Dealing first = Deal(tokens, Quadratic(), rules), again = Deal(tokens, Quadratic(), rules);
  for (size_t g = 0; g < first.groups.size(); ++g) {
    for (size_t b = 0; b < first.groups[g].size(); ++b) {
      EXPECT_EQ(first.groups[g][b].samples, again.groups[g].at(b).samples);
    }
  }
}

TEST(DealingTest, EqualOnesGoRoundRobin) {
  const Dealing dealing = DealInOrder(Lengths(5, 64), {}, {.groups = 2, .capacity = 64});
  ASSERT_EQ(dealing.groups[1].size(), 2u);
  EXPECT_THAT(dealing.groups[1][0].samples, ElementsAre(1));
  EXPECT_THAT(dealing.groups[1][1].samples, ElementsAre(3));
  EXPECT_EQ(dealing.MostMicroBatches(), 3u);
}

// The share of a step that groups wait for each other: predicted, over 200 steps of 16 samples for
// two groups. In order, they meet at every micro-batch. docs/balance.md shows what this prints.
TEST(DealingTest, GroupsOfRealisticLengthsHardlyWait) {
  for (const auto& [name, draw] : bench::kLengthDistributions) {
    bench::LengthRandom random(1);
    double in_order = 0, in_order_totals = 0, dealt = 0, speed = 0;
    constexpr int kSteps = 200;
    for (int step = 0; step < kSteps; ++step) {
      Lengths tokens(16);
      for (uint64_t& length : tokens) length = draw(random);
      const DealingRules rules = {.groups = 2, .capacity = 1 << 18, .one_sample = true};
      const Dealing naive = DealInOrder(tokens, Quadratic(), rules);
      const Dealing ours = Deal(tokens, Quadratic(), rules);
      int64_t meeting = 0, slowest = 0, sum = 0;
      for (size_t b = 0; b < naive.groups[0].size(); ++b) {
        const int64_t a = naive.groups[0][b].microseconds, c = naive.groups[1][b].microseconds;
        meeting += std::max(a, c);
        sum += a + c;
      }
      for (const auto& group : ours.groups) {
        int64_t load = 0;
        for (const MicroBatch& batch : group) load += batch.microseconds;
        slowest = std::max(slowest, load);
      }
      in_order += 2.0 * static_cast<double>(meeting) / static_cast<double>(sum) / kSteps;
      in_order_totals += naive.Imbalance() / kSteps;
      dealt += ours.Imbalance() / kSteps;
      speed += static_cast<double>(meeting) / static_cast<double>(slowest) / kSteps;
    }
    std::printf(
        "%-14s max/mean in order %.3f (meeting at every micro-batch %.3f), dealt %.3f: "
        "%.2f x\n",
        name, in_order_totals, in_order, dealt, speed);
    EXPECT_LT(dealt, 1 + (in_order_totals - 1) / 2) << name;
    EXPECT_GE(speed, 1.2) << name;
  }
}

// Comparing all pairs would take hours.
TEST(DealingTest, HoweverManyThereAre) {
  Lengths tokens(300'000);
  std::mt19937_64 random(5);
  for (uint64_t& length : tokens) length = 1 + random() % 4096;
  const DealingRules rules = {.groups = 2, .capacity = 4096, .multiple = 64};
  const Dealing dealing = Deal(tokens, Quadratic(), rules);
  ExpectEachOnce(dealing, tokens, rules);
  EXPECT_LT(dealing.Imbalance(), 1.001);
}

TEST(DealingTest, AThousandGroupsAreDealtEvenly) {
  bench::LengthRandom random(2);
  Lengths tokens(16384);
  for (uint64_t& length : tokens) length = bench::LongAlignLike(random);
  const DealingRules rules = {
      .groups = 1024, .capacity = 1 << 17, .multiple = 128, .one_sample = true};
  const Dealing dealing = Deal(tokens, Quadratic(), rules);
  ExpectEachOnce(dealing, tokens, rules);
  EXPECT_LT(dealing.Imbalance(), 1.2);
}

TEST(RulesForSamplesTest, MicroBatchesAreWholeTilesThatDivideByTheLayout) {
  ring::Division division = {
      .layout = kernels::LayoutKind::kStriped, .ranks = 4, .tile = 64, .stripe = 32};
  const DealingRules rules = RulesForSamples(3, 4096, division, /*goes_by_distance=*/true);
  EXPECT_EQ(rules.groups, 3);
  EXPECT_EQ(rules.capacity, 4096);
  EXPECT_EQ(rules.multiple, 128);
  EXPECT_TRUE(rules.group_permille.empty());
  division.stripe = 48;
  EXPECT_EQ(RulesForSamples(3, 4096, division, true).multiple, 192);
  division.ranks = 1;
  EXPECT_EQ(RulesForSamples(3, 4096, division, true).multiple, 64);
  division.heads = 3;
  EXPECT_EQ(RulesForSamples(3, 4096, division, true).multiple, 192);
}

TEST(RulesForSamplesTest, SamplesShareAMicroBatchWhereNoneChangesWhatAnotherSees) {
  const ring::Division whole = {.layout = kernels::LayoutKind::kStriped};
  const ring::Division apart = {.layout = kernels::LayoutKind::kStriped, .by_documents = true};
  EXPECT_TRUE(RulesForSamples(1, 64, whole, /*goes_by_distance=*/false).one_sample);
  EXPECT_FALSE(RulesForSamples(1, 64, whole, /*goes_by_distance=*/true).one_sample);
  EXPECT_FALSE(RulesForSamples(1, 64, apart, /*goes_by_distance=*/false).one_sample);
  EXPECT_FALSE(RulesForSamples(1, 64, apart, /*goes_by_distance=*/true).one_sample);
}

}  // namespace
}  // namespace ringleader::balance
