#include "coordinator/planner/simulate/laid_documents.h"

#include <gtest/gtest.h>

#include <vector>

#include "balance/document_dealing.h"

namespace ringleader::planner {
namespace {

TEST(LaidDocumentsTest, AreDealtAsTrainersDealThem) {
  std::vector<int64_t> lengths(31, 1000);
  lengths.push_back(65536 - 31000);
  patterns::AttentionOptions attention = {.tile = 128, .stripe = 128, .by_documents = true};
  const auto dense = balance::DealDocuments(lengths, 4, 128, {}),
             apart = balance::DealDocumentsApart(lengths, 4, 128, {});
  ASSERT_NE(dense.holders, apart.holders) << "lengths that tell them apart";
  EXPECT_EQ(LayByDocuments(lengths, attention, 4, {})->holders, dense.holders);
  attention.pattern = patterns::Pattern::kXAttention;
  const auto laid = LayByDocuments(lengths, attention, 4, {});
  EXPECT_EQ(laid->holders, apart.holders);
  EXPECT_EQ(laid->imbalance, apart.imbalance);
  EXPECT_TRUE(laid->are_apart);
}

// Two whole documents of a rank, short ones together, and a spread one in slots of whole stripes.
TEST(LaidDocumentsTest, CallsAndSlotsAreThoseOfTrainers) {
  const patterns::AttentionOptions attention = {.pattern = patterns::Pattern::kXAttention,
                                                .dense_below = 500,
                                                .tile = 128,
                                                .stripe = 128,
                                                .by_documents = true};
  const auto whole = LayByDocuments({1000, 1000, 1000, 1000, 300, 300, 100, 100}, attention, 2, {});
  EXPECT_EQ(whole->spread, 0);
  EXPECT_EQ(whole->travelling_tokens, 0);
  EXPECT_EQ(whole->whole_calls, 3);
  EXPECT_EQ(whole->local_tokens, 19 * 128);  // 2,400, up to whole stripes
  const auto spread = LayByDocuments({4000}, attention, 2, {});
  EXPECT_EQ(spread->spread, 1);
  EXPECT_EQ(spread->whole_calls, 0);
  EXPECT_EQ(spread->travelling_tokens, 2048);
  EXPECT_EQ(spread->spread_tokens, (std::vector<int64_t>{2048, 1952}));
  EXPECT_TRUE(IsShort(attention, 499));
  EXPECT_FALSE(IsShort(attention, 500));
}

}  // namespace
}  // namespace ringleader::planner
