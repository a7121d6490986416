#include "balance/document_dealing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

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

// What each rank takes of its whole documents and, by the tokens `spread_held` that it holds of
// them, of the spread ones.
double TimesMostOverMean(std::span<const int64_t> lengths, const DocumentDealing& dealing,
                         const std::vector<int64_t>& spread_held, const SampleWeights& weights) {
  double spread = 0, spread_tokens = 0;
  std::vector<double> times(spread_held.size(), 0);
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto time = static_cast<double>(weights.Microseconds(static_cast<uint64_t>(lengths[i])));
    if (dealing.holders[i].has_value()) {
      times[*dealing.holders[i]] += time;
    } else {
      spread += time;
      spread_tokens += static_cast<double>(lengths[i]);
    }
  }
  for (size_t rank = 0; rank < times.size() && spread > 0; ++rank) {
    times[rank] += spread * static_cast<double>(spread_held[rank]) / spread_tokens;
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
    EXPECT_LE(dealing.imbalance, 1.02);
    std::vector<int64_t> whole(ranks, 0);
    bool any_spread = false;
    for (size_t i = 0; i < lengths.size(); ++i) {
      if (!dealing.holders[i].has_value()) {
        any_spread = true;
        continue;
      }
      ASSERT_LT(*dealing.holders[i], ranks);
      whole[*dealing.holders[i]] += lengths[i];
    }
    // Stripes of spread documents fill every rank up to its share, at least one.
    for (const int64_t held : whole) {
      EXPECT_LE(held, any_spread ? share - stripe : share);
      EXPECT_GE(held, any_spread ? 0 : share);
    }
    for (int64_t& held : whole) held = share - held;
    EXPECT_NEAR(dealing.imbalance, TimesMostOverMean(lengths, dealing, whole, weights), 1e-9);
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
