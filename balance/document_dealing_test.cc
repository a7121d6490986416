#include "balance/document_dealing.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "ring/document_layout.h"

namespace ringleader::balance {
namespace {

// Costs that grow with the square of the length beyond some thousand tokens.
SampleWeights Weights() {
  std::vector<SampleWeight> rows;
  for (uint64_t tokens = 64; tokens <= 1 << 20; tokens *= 2) {
    const auto n = static_cast<double>(tokens);
    rows.push_back({.tokens = tokens, .milliseconds = n * 1e-3 + n * n * 1e-7});
  }
  return *SampleWeights::Create(rows);
}

// Lengths with logarithms that are even in [least, most], cut so that they fill the sequence.
std::vector<int64_t> RandomLengths(int64_t tokens, double least, double most,
                                   std::mt19937& random) {
  std::uniform_real_distribution<double> logarithm(std::log(least), std::log(most));
  std::vector<int64_t> lengths;
  for (int64_t left = tokens; left > 0; left -= lengths.back()) {
    lengths.push_back(std::min(left, static_cast<int64_t>(std::exp(logarithm(random)))));
  }
  return lengths;
}

double MostOverMean(const std::vector<double>& values) {
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return *std::ranges::max_element(values) * static_cast<double>(values.size()) / sum;
}

// As Weights(), of which the square is attention's. `travel`: milliseconds of a token.
SampleWeights WeightsOfAttention(double travel = 0) {
  std::vector<SampleWeight> rows;
  for (uint64_t tokens = 64; tokens <= 1 << 20; tokens *= 2) {
    const auto n = static_cast<double>(tokens);
    rows.push_back({.tokens = tokens,
                    .milliseconds = n * 1e-3 + n * n * 1e-7,
                    .attention_milliseconds = n * n * 1e-7,
                    .travel_milliseconds = n * travel});
  }
  return *SampleWeights::Create(rows);
}

// Max over ranks / mean, token by token, with as much of a document's attention as a token has
// keys.
double Imbalance(const std::vector<int64_t>& lengths,
                 const std::vector<std::optional<int>>& holders, int ranks, int64_t stripe,
                 const SampleWeights& weights) {
  std::vector<int64_t> firsts, number_of;
  for (const int64_t length : lengths) {
    firsts.push_back(std::ssize(number_of));
    number_of.resize(number_of.size() + length, std::ssize(firsts) - 1);
  }
  const auto layout = ring::DocumentLayout::Create(std::ssize(number_of), firsts, holders, ranks,
                                                   static_cast<int>(stripe));
  EXPECT_TRUE(layout.ok()) << layout.status();
  std::vector<double> times(ranks, 0);
  for (int rank = 0; rank < ranks; ++rank) {
    for (const int64_t position : layout->Positions(rank)) {
      const int64_t document = number_of[position];
      const auto length = static_cast<uint64_t>(lengths[document]);
      const auto attention = static_cast<double>(weights.AttentionMicroseconds(length));
      const auto all = static_cast<double>(length);
      const auto keys = static_cast<double>(position - firsts[document]) + 0.5;
      times[rank] += (static_cast<double>(weights.Microseconds(length)) - attention) / all +
                     attention * keys * 2 / (all * all);
    }
  }
  return MostOverMean(times);
}

TEST(DocumentDealingTest, TokensAndTimesAreEvenWhateverTheLengths) {
  std::mt19937 random(11);
  const SampleWeights weights = Weights();
  for (int trial = 0; trial < 300; ++trial) {
    const int ranks = 1 << trial % 5;
    const int64_t stripe = 128, share = stripe * (4 + trial % 97), tokens = share * ranks;
    const std::vector<int64_t> lengths =
        RandomLengths(tokens, 2, static_cast<double>(tokens) / (1 + trial % 7), random);
    const DocumentDealing dealing = DealDocuments(lengths, ranks, stripe, weights);
    ASSERT_EQ(dealing.holders.size(), lengths.size());
    std::vector<int64_t> whole(ranks, 0);
    size_t spread = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      if (!dealing.holders[i].has_value()) {
        ++spread;
        continue;
      }
      ASSERT_LT(*dealing.holders[i], ranks);
      whole[*dealing.holders[i]] += lengths[i];
    }
    // Of all that are spread, few stripes are as even as they can be.
    EXPECT_LE(dealing.imbalance, spread == lengths.size() ? 1.05 : 1.02) << trial;
    // Stripes of spread documents fill every rank up to its share, at least one.
    for (const int64_t held : whole) {
      EXPECT_LE(held, spread > 0 ? share - stripe : share);
      EXPECT_GE(held, spread > 0 ? 0 : share);
    }
  }
}

// Tokens that each rank holds where spread documents are apart.
std::vector<int64_t> HeldApart(std::span<const int64_t> lengths, const DocumentDealing& dealing,
                               int ranks, int64_t stripe) {
  std::vector<int64_t> held(ranks, 0);
  for (size_t i = 0; i < lengths.size(); ++i) {
    for (int rank = 0; rank < ranks; ++rank) {
      if (!dealing.holders[i].has_value()) {
        held[rank] += ring::DocumentLayout::HeldOf(lengths[i], rank, ranks, stripe);
      } else if (*dealing.holders[i] == rank) {
        held[rank] += lengths[i];
      }
    }
  }
  return held;
}

// What memory is planned for is enough for documents of ordinary lengths.
TEST(DocumentDealingTest, ApartTokensAndTimesAreEvenToo) {
  std::mt19937 random(12);
  const SampleWeights weights = Weights();
  for (int trial = 0; trial < 300; ++trial) {
    const int ranks = 1 << trial % 4;
    const int64_t stripe = 64, tokens = 65536 * ranks - 1 - trial;
    const std::vector<int64_t> lengths =
        RandomLengths(tokens, 64, static_cast<double>(tokens) / (1 + trial % 7), random);
    const DocumentDealing dealing = DealDocumentsApart(lengths, ranks, stripe, weights);
    ASSERT_EQ(dealing.holders.size(), lengths.size());
    EXPECT_LE(dealing.imbalance, 1.03) << trial;
    const std::vector<int64_t> held = HeldApart(lengths, dealing, ranks, stripe);
    EXPECT_LE(*std::ranges::max_element(held), ring::MostLocalTokensApart(tokens / ranks));
  }
}

TEST(DocumentDealingTest, ApartAsFewAreSpreadAsKeepRanksEven) {
  const auto spread = [](const std::vector<int64_t>& lengths) {
    const DocumentDealing dealing = DealDocumentsApart(lengths, 4, 128, Weights());
    return std::ranges::count_if(dealing.holders, [](auto holder) { return !holder.has_value(); });
  };
  std::vector<int64_t> lengths(33, 1000);
  EXPECT_EQ(spread(std::vector<int64_t>(32, 1000)), 0);
  EXPECT_EQ(spread({4000}), 1);
  EXPECT_EQ(spread({100}), 0) << "of one stripe: on one rank in any case";
  lengths[7] = int64_t{96} * 1024;
  EXPECT_EQ(spread(lengths), 1);
  EXPECT_FALSE(DealDocumentsApart(lengths, 4, 128, Weights()).holders[7].has_value());
}

// Ranks that go on getting stripes when others are full get the last parts of spread documents,
// whose tokens see most: they are given less for it. Counted here token by token.
TEST(DocumentDealingTest, WhatSpreadDocumentsTakeIsCountedWhereTheirTokensLie) {
  std::mt19937 random(13);
  const SampleWeights weights = WeightsOfAttention();
  int some_spread = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const int ranks = 2 << trial % 3;
    const int64_t stripe = 128, tokens = int64_t{32768} * ranks;
    const std::vector<int64_t> lengths =
        RandomLengths(tokens, 256, static_cast<double>(tokens), random);
    const DocumentDealing dealing = DealDocuments(lengths, ranks, stripe, weights);
    ASSERT_EQ(dealing.holders.size(), lengths.size());
    EXPECT_LE(dealing.imbalance, 1.02) << trial;
    const auto spread = std::ranges::count(dealing.holders, std::optional<int>());
    some_spread += spread > 0 && std::cmp_less(spread, lengths.size()) ? 1 : 0;
    EXPECT_NEAR(Imbalance(lengths, dealing.holders, ranks, stripe, weights), dealing.imbalance,
                1e-6)
        << trial;
  }
  EXPECT_GE(some_spread, 20) << "documents of both kinds";
}

int64_t SpreadTokens(const std::vector<int64_t>& lengths, const DocumentDealing& dealing) {
  int64_t tokens = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (!dealing.holders[i].has_value()) tokens += lengths[i];
  }
  return tokens;
}

// What a step takes, in milliseconds, of which nothing that travels is hidden: `travel` a token, of
// as many on all ranks as the one that holds most of them has.
double Cost(const std::vector<int64_t>& lengths, const DocumentDealing& dealing, int ranks,
            int64_t stripe, const SampleWeights& weights, double travel) {
  double all = 0;
  std::vector<int64_t> firsts;
  int64_t tokens = 0;
  for (const int64_t length : lengths) {
    all += 1e-3 * static_cast<double>(weights.Microseconds(static_cast<uint64_t>(length)));
    firsts.push_back(tokens);
    tokens += length;
  }
  auto travelling = static_cast<double>(SpreadTokens(lengths, dealing));
  const auto layout = ring::DocumentLayout::Create(tokens, firsts, dealing.holders, ranks,
                                                   static_cast<int>(stripe));
  if (dealing.token_imbalance == 1 && layout.ok()) {
    travelling = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      travelling = std::max(travelling, static_cast<double>(layout->spread_tokens()[rank] * ranks));
    }
  }
  return dealing.imbalance * all / ranks + travel * travelling;
}

// What travels is weighed against ranks that wait for each other: the slower the links, the fewer
// tokens are spread, and no dealing takes longer than the one that goes by evenness alone.
TEST(DocumentDealingTest, TheSlowerTheLinksTheFewerTokensTravel) {
  for (const bool apart : {false, true}) {
    std::mt19937 random(15);
    const auto deal = apart ? DealDocumentsApart : DealDocuments;
    int shorter = 0, evener = 0;
    double spread_fast = 0, spread_slow = 0, spread_slower = 0;
    for (int trial = 0; trial < 60; ++trial) {
      const int ranks = 2 << trial % 3;
      const std::vector<int64_t> lengths =
          RandomLengths(int64_t{32768} * ranks, 256, 65536, random);
      const DocumentDealing even = deal(lengths, ranks, 128, WeightsOfAttention());
      const auto priced = [&](double travel, double* spread) {
        DocumentDealing dealing = deal(lengths, ranks, 128, WeightsOfAttention(travel));
        *spread += static_cast<double>(SpreadTokens(lengths, dealing));
        const double cost = Cost(lengths, dealing, ranks, 128, WeightsOfAttention(), travel),
                     before = Cost(lengths, even, ranks, 128, WeightsOfAttention(), travel);
        if (even.token_imbalance <= 1.02) {
          EXPECT_LE(cost, before * (1 + 1e-9)) << trial;
          EXPECT_LE(dealing.token_imbalance, 1.02) << "for which memory is planned";
        }
        shorter += cost < 0.99 * before ? 1 : 0;
        return dealing;
      };
      const DocumentDealing fast = priced(1e-6, &spread_fast);
      evener += fast.imbalance < even.imbalance - 1e-3 ? 1 : 0;
      priced(3e-4, &spread_slow);
      priced(3e-3, &spread_slower);
    }
    EXPECT_LT(spread_slow, 0.9 * spread_fast);
    EXPECT_LT(spread_slower, 0.97 * spread_slow);
    EXPECT_GE(shorter, 30);
    EXPECT_GE(evener, 20) << "fast links are no reason to stop at 2 %";
  }
}

// Of a few documents on two ranks every dealing is tried here.
TEST(DocumentDealingTest, FewDocumentsAreDealtNearlyAsWellAsTheyCanBe) {
  std::mt19937 random(16);
  constexpr int kStripe = 64;
  constexpr int64_t kShare = 4096;
  double worst = 1, sum = 0;
  constexpr int kTrials = 12;
  for (int trial = 0; trial < kTrials; ++trial) {
    const double travel = std::array{1e-5, 2e-4, 2e-3}[trial % 3];
    std::vector<int64_t> lengths = RandomLengths(2 * kShare, 300, 6000, random);
    while (lengths.size() > 7) {
      lengths[lengths.size() - 2] += lengths.back();
      lengths.pop_back();
    }
    const SampleWeights weights = WeightsOfAttention(travel);
    const DocumentDealing dealing = DealDocuments(lengths, 2, kStripe, weights);
    std::vector<int64_t> firsts = {0};
    for (const int64_t length : lengths) firsts.push_back(firsts.back() + length);
    firsts.pop_back();
    double best = std::numeric_limits<double>::infinity();
    DocumentDealing tried = {.holders = std::vector<std::optional<int>>(lengths.size())};
    const auto all = static_cast<int>(std::pow(3, lengths.size()));
    for (int number = 0; number < all; ++number) {
      for (int i = 0, rest = number; i < std::ssize(lengths); ++i, rest /= 3) {
        tried.holders[i] = rest % 3 == 2 ? std::nullopt : std::optional(rest % 3);
      }
      if (!ring::DocumentLayout::Create(2 * kShare, firsts, tried.holders, 2, kStripe).ok()) {
        continue;
      }
      tried.imbalance = Imbalance(lengths, tried.holders, 2, kStripe, weights);
      best = std::min(best, Cost(lengths, tried, 2, kStripe, weights, travel));
    }
    const double ratio = Cost(lengths, dealing, 2, kStripe, weights, travel) / best;
    EXPECT_GE(ratio, 1 - 1e-6) << trial;
    worst = std::max(worst, ratio);
    sum += ratio;
  }
  EXPECT_LE(worst, 1.05);
  EXPECT_LE(sum / kTrials, 1.01);
}

// Where no number of spread documents makes ranks even, the one that comes nearest counts.
TEST(DocumentDealingTest, ManyRanksAreAsEvenAsTheyCome) {
  std::mt19937 random(5);
  const SampleWeights weights = WeightsOfAttention();
  for (const auto& [ranks, share] : {std::pair{256, 16384}, {1024, 4096}}) {
    const std::vector<int64_t> lengths = RandomLengths(int64_t{share} * ranks, 512, 65536, random);
    const DocumentDealing dealing = DealDocuments(lengths, ranks, /*stripe=*/64, weights);
    EXPECT_NEAR(dealing.imbalance, Imbalance(lengths, dealing.holders, ranks, 64, weights), 1e-6);
    EXPECT_GT(dealing.imbalance, 1.02) << "else this shows nothing";
    const std::vector<std::optional<int>> all_spread(lengths.size());
    EXPECT_LT(dealing.imbalance, Imbalance(lengths, all_spread, ranks, 64, weights) - 0.01);
  }
}

TEST(DocumentDealingTest, LongDocumentsAreSpreadAndShortOnesWhole) {
  // One document of three quarters of the sequence, and short ones.
  std::vector<int64_t> lengths(33, 1024);
  lengths[7] = int64_t{96} * 1024;
  const DocumentDealing dealing = DealDocuments(lengths, 4, 128, Weights());
  EXPECT_FALSE(dealing.holders[7].has_value());
  EXPECT_GE(std::ranges::count_if(dealing.holders, [](auto h) { return h.has_value(); }), 30);
}

TEST(DocumentDealingTest, NothingIsSpreadWhereWholeDocumentsFillTheRanksEvenly) {
  const std::vector<int64_t> lengths(16, 512);
  const DocumentDealing dealing = DealDocuments(lengths, 4, 128, Weights());
  for (const auto holder : dealing.holders) EXPECT_TRUE(holder.has_value());
  EXPECT_EQ(dealing.imbalance, 1.0);
}

TEST(DocumentDealingTest, OneDocumentIsSpread) {
  EXPECT_FALSE(DealDocuments(std::vector<int64_t>{4096}, 4, 128, Weights()).holders[0].has_value());
}

// Whoever lays them out is told what does not divide.
TEST(DocumentDealingTest, ASumThatDoesNotDivideIsSpreadWhole) {
  for (const std::vector<int64_t>& lengths :
       std::vector<std::vector<int64_t>>{{1000, 500, 23}, {100}, {7, 5, 1}}) {
    const DocumentDealing dealing = DealDocuments(lengths, 4, 128, WeightsOfAttention());
    ASSERT_EQ(dealing.holders.size(), lengths.size());
    for (const auto holder : dealing.holders) EXPECT_FALSE(holder.has_value());
    EXPECT_EQ(dealing.imbalance, 1.0);
  }
}

TEST(DocumentDealingTest, WithoutWeightsTokensAreEven) {
  std::vector<int64_t> lengths(63, 1000);
  lengths.push_back(65536 - 63000);
  const DocumentDealing dealing = DealDocuments(lengths, 4, 128, {});
  std::vector<int64_t> whole(4, 0);
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (dealing.holders[i].has_value()) whole[*dealing.holders[i]] += lengths[i];
  }
  EXPECT_LE(*std::ranges::max_element(whole) - *std::ranges::min_element(whole), 3000);
}

}  // namespace
}  // namespace ringleader::balance
