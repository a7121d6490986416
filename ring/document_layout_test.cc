#include "ring/document_layout.h"

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "base/numbers/ceil_div.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::ring {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Holders = std::vector<std::optional<int>>;
using kernels::LayoutKind;
using kernels::ShardLayout;

struct Problem {
  int ranks = 1, stripe = 1;
  int64_t tokens = 0;
  std::vector<int64_t> firsts;
  Holders holders;

  int64_t End(size_t document) const {
    return document + 1 < firsts.size() ? firsts[document + 1] : tokens;
  }
};

// Documents of all lengths, some of them whole on ranks with room.
Problem RandomProblem(std::mt19937& random) {
  const auto below = [&](int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n - 1)(random);
  };
  Problem problem;
  problem.ranks = static_cast<int>(1 + below(5));
  problem.stripe = static_cast<int>(1 + below(4));
  const int64_t share = problem.stripe * (2 + below(12));
  problem.tokens = share * problem.ranks;
  std::set<int64_t> firsts = {0};
  for (int64_t i = below(20); i > 0; --i) firsts.insert(below(problem.tokens));
  problem.firsts.assign(firsts.begin(), firsts.end());
  std::vector<int64_t> room(problem.ranks, share - 1);  // one spread token, at least
  for (size_t i = 0; i < problem.firsts.size(); ++i) {
    const int64_t tokens = problem.End(i) - problem.firsts[i];
    const auto rank = static_cast<int>(below(problem.ranks));
    const bool is_whole = below(3) > 0 && room[rank] >= tokens;
    if (is_whole) room[rank] -= tokens;
    problem.holders.push_back(is_whole ? std::optional<int>(rank) : std::nullopt);
  }
  return problem;
}

// The spread documents, the longest first unless all are spread.
std::vector<size_t> SpreadOf(const Problem& problem) {
  std::vector<size_t> spread;
  for (size_t i = 0; i < problem.holders.size(); ++i) {
    if (!problem.holders[i].has_value()) spread.push_back(i);
  }
  if (spread.size() == problem.holders.size()) return spread;
  std::ranges::stable_sort(spread, std::greater(), [&](size_t document) {
    return problem.End(document) - problem.firsts[document];
  });
  return spread;
}

// What the ring knows of the spread documents: their tokens in the order of the places that ranks
// hold, and the places with which they start.
void CheckRing(const Problem& problem, const DocumentLayout& layout) {
  std::map<int64_t, int64_t> position_at;  // by place
  for (int rank = 0; rank < problem.ranks; ++rank) {
    const ShardLayout stripes = {.kind = LayoutKind::kStriped,
                                 .ranks = problem.ranks,
                                 .rank = rank,
                                 .stripe = problem.stripe,
                                 .tokens = layout.ring_tokens()};
    const std::vector<int64_t> positions = layout.Positions(rank);
    ASSERT_LE(layout.spread_tokens()[rank], stripes.local_tokens());
    for (int64_t i = 0; i < layout.spread_tokens()[rank]; ++i) {
      position_at[stripes.Position(i)] = positions[i];
    }
  }
  const std::vector<int64_t> firsts = layout.RingFirsts();
  auto first = firsts.begin();
  auto at = position_at.begin();
  for (const size_t i : SpreadOf(problem)) {
    ASSERT_NE(first, firsts.end());
    EXPECT_EQ(*first++, at->first);
    for (int64_t position = problem.firsts[i]; position < problem.End(i); ++position, ++at) {
      ASSERT_NE(at, position_at.end());
      EXPECT_EQ(at->second, position);
    }
  }
  EXPECT_EQ(first, firsts.end());
  EXPECT_EQ(at, position_at.end());
}

// Runs of spread documents are of one document, and what each rank holds of them.
void CheckVisits(const Problem& problem, const DocumentLayout& layout) {
  std::vector<std::vector<int64_t>> visited(problem.ranks);
  layout.VisitSpread([&](int rank, size_t document, int64_t first, int64_t count) {
    EXPECT_FALSE(problem.holders[document].has_value());
    EXPECT_GE(first, problem.firsts[document]);
    EXPECT_LE(first + count, problem.End(document));
    EXPECT_LE(count, problem.stripe);
    for (int64_t i = 0; i < count; ++i) visited[rank].push_back(first + i);
  });
  for (int rank = 0; rank < problem.ranks; ++rank) {
    std::vector<int64_t> positions = layout.Positions(rank);
    positions.resize(layout.spread_tokens()[rank]);
    EXPECT_EQ(visited[rank], positions);
  }
}

TEST(DocumentLayoutTest, EveryTokenLiesOnceWhereItsDocumentLies) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 500; ++trial) {
    const Problem problem = RandomProblem(random);
    const auto layout = DocumentLayout::Create(problem.tokens, problem.firsts, problem.holders,
                                               problem.ranks, problem.stripe);
    const bool any_spread = std::ranges::any_of(
        problem.holders, [](const std::optional<int>& holder) { return !holder.has_value(); });
    if (!any_spread) continue;  // one place a rank is left
    ASSERT_TRUE(layout.ok()) << layout.status();
    std::set<int64_t> seen;
    for (int rank = 0; rank < problem.ranks; ++rank) {
      const std::vector<int64_t> positions = layout->Positions(rank);
      ASSERT_EQ(static_cast<int64_t>(positions.size()), layout->local_tokens());
      seen.insert(positions.begin(), positions.end());
      // After the spread tokens comes each whole document, from its first token to its last.
      const std::vector<int64_t> firsts = layout->WholeFirsts(rank);
      auto at = positions.begin() + layout->spread_tokens()[rank];
      auto first = firsts.begin();
      for (size_t i = 0; i < problem.firsts.size(); ++i) {
        if (problem.holders[i] != rank) continue;
        EXPECT_EQ(*first++, at - positions.begin() - layout->spread_tokens()[rank]);
        for (int64_t p = problem.firsts[i]; p < problem.End(i); ++p) EXPECT_EQ(*at++, p);
      }
      EXPECT_EQ(first, firsts.end());
      EXPECT_EQ(at, positions.end());
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), problem.tokens);
    CheckRing(problem, *layout);
    CheckVisits(problem, *layout);
  }
}

TEST(DocumentLayoutTest, AllSpreadAreTheStripesOfTheSequence) {
  const std::vector<int64_t> firsts = {0, 5, 40};
  const auto layout = DocumentLayout::Create(96, firsts, Holders(3), 3, 8);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_TRUE(layout->has_spread());
  EXPECT_EQ(layout->ring_tokens(), 96);
  EXPECT_EQ(layout->RingFirsts(), firsts);
  for (int rank = 0; rank < 3; ++rank) {
    const ShardLayout stripes = {
        .kind = LayoutKind::kStriped, .ranks = 3, .rank = rank, .stripe = 8, .tokens = 96};
    const std::vector<int64_t> positions = layout->Positions(rank);
    for (int64_t i = 0; i < 32; ++i) EXPECT_EQ(positions[i], stripes.Position(i));
  }
}

TEST(DocumentLayoutTest, WholeDocumentsThatFillTheRanksLeaveNothingToSpread) {
  const auto layout =
      DocumentLayout::Create(16, std::vector<int64_t>{0, 3, 11}, Holders{1, 0, 1}, 2, 4);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_FALSE(layout->has_spread());
  EXPECT_EQ(layout->ring_tokens(), 0);
  EXPECT_THAT(layout->Positions(1), ElementsAre(0, 1, 2, 11, 12, 13, 14, 15));
}

// Each spread document by itself: a rank has what its part of a ShardLayout of the document is, cut
// at the document's end; then the whole ones, the longest first; then filler.
TEST(DocumentLayoutTest, ApartASpreadDocumentIsDealtAsASequence) {
  std::mt19937 random(9);
  for (int trial = 0; trial < 300; ++trial) {
    const Problem problem = RandomProblem(random);
    const auto layout = DocumentLayout::CreateApart(problem.tokens - 1, problem.firsts,
                                                    problem.holders, problem.ranks, problem.stripe);
    if (problem.firsts.back() == problem.tokens - 1) continue;  // a document without tokens
    ASSERT_TRUE(layout.ok()) << layout.status();
    EXPECT_TRUE(layout->is_apart());
    const int64_t tokens = problem.tokens - 1, round = int64_t{problem.ranks} * problem.stripe;
    EXPECT_EQ(layout->local_tokens() % problem.stripe, 0);
    int64_t most = 0;
    for (int rank = 0; rank < problem.ranks; ++rank) {
      std::vector<int64_t> expected, lengths;
      for (size_t i = 0; i < problem.firsts.size(); ++i) {
        if (problem.holders[i].has_value()) continue;
        const int64_t length = std::min(problem.End(i), tokens) - problem.firsts[i];
        lengths.push_back(length);
        const ShardLayout stripes = {.kind = LayoutKind::kStriped,
                                     .ranks = problem.ranks,
                                     .rank = rank,
                                     .stripe = problem.stripe,
                                     .tokens = RoundUp(length, round)};
        int64_t held = 0;
        for (int64_t j = 0; j < stripes.local_tokens(); ++j) {
          if (stripes.Position(j) >= length) continue;
          expected.push_back(problem.firsts[i] + stripes.Position(j));
          ++held;
        }
        EXPECT_EQ(DocumentLayout::HeldOf(length, rank, problem.ranks, problem.stripe), held);
      }
      EXPECT_EQ(layout->SpreadLengths(), lengths);
      EXPECT_EQ(layout->has_spread(), !lengths.empty());
      EXPECT_EQ(layout->spread_tokens()[rank], std::ssize(expected));
      const std::vector<int64_t> positions = layout->Positions(rank);
      const std::vector<int64_t> whole = layout->WholeLengths(rank),
                                 firsts = layout->WholeFirsts(rank);
      EXPECT_TRUE(std::ranges::is_sorted(whole, std::greater()));
      ASSERT_EQ(whole.size(), firsts.size());
      for (size_t i = 0; i < whole.size(); ++i) {
        EXPECT_EQ(firsts[i], std::ssize(expected) - layout->spread_tokens()[rank]);
        const int64_t first = positions[std::ssize(expected)];
        const auto document = std::ranges::find(problem.firsts, first) - problem.firsts.begin();
        EXPECT_EQ(problem.holders[document], rank);
        EXPECT_EQ(std::min(problem.End(document), tokens) - first, whole[i]);
        for (int64_t p = 0; p < whole[i]; ++p) expected.push_back(first + p);
      }
      most = std::max<int64_t>(most, std::ssize(expected));
      for (int64_t next = tokens; std::ssize(expected) < layout->local_tokens(); ++next) {
        expected.push_back(next);
      }
      EXPECT_EQ(positions, expected);
    }
    EXPECT_GE(layout->local_tokens(), most);
    EXPECT_LT(layout->local_tokens() - most, problem.stripe);
  }
}

TEST(DocumentLayoutTest, RoomForWhatLiesApartIsASixteenthMore) {
  EXPECT_EQ(MostLocalTokensApart(160), 170);
  EXPECT_EQ(MostLocalTokensApart(161), 172);
  EXPECT_EQ(MostLocalTokensApart(1), 2);
}

TEST(DocumentLayoutTest, WhatDoesNotFitIsNamed) {
  const auto error = [](int64_t tokens, std::vector<int64_t> firsts, Holders holders) {
    return std::string(DocumentLayout::Create(tokens, firsts, holders, 2, 4).status().message());
  };
  EXPECT_THAT(error(12, {0}, Holders(1)), HasSubstr("12 tokens do not divide by ranks × stripe"));
  EXPECT_THAT(error(16, {1}, Holders(1)), HasSubstr("starts ascend from 0"));
  EXPECT_THAT(error(16, {0, 4}, Holders(1)), HasSubstr("2 starts and 1 holders"));
  EXPECT_THAT(error(16, {0, 4}, {2, std::nullopt}), HasSubstr("held by rank 2 of 2"));
  EXPECT_THAT(error(16, {0, 4}, {-1, std::nullopt}), HasSubstr("held by rank -1 of 2"));
  EXPECT_THAT(error(16, {0, 4, 4}, Holders(3)), HasSubstr("starts at 4 and ends at 4"));
  EXPECT_THAT(error(16, {0, 9}, {0, 1}), HasSubstr("whole documents of 9 tokens of 8"));
  EXPECT_THAT(error(16, {0, 8}, {0, std::nullopt}), HasSubstr("none of those that are spread"));
  const std::vector<int64_t> firsts = {0, 4};
  const auto apart = [&](int64_t tokens, const Holders& holders, int stripe) {
    const auto layout = DocumentLayout::CreateApart(tokens, firsts, holders, 2, stripe);
    return std::string(layout.status().message());
  };
  EXPECT_THAT(apart(9, {2, 0}, 4), HasSubstr("held by rank 2 of 2"));
  EXPECT_THAT(apart(4, Holders(2), 4), HasSubstr("starts at 4 and ends at 4"));
  EXPECT_THAT(apart(9, Holders(2), 0), HasSubstr("9 tokens in stripes of 0 over 2 ranks"));
}

}  // namespace
}  // namespace ringleader::ring
