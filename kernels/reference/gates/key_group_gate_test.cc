// The CPU engine's choice of groups of keys against the fp64 oracle.
#include "kernels/reference/gates/key_group_gate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/reference/gates/block_gate.h"
#include "kernels/reference/testing/key_group_oracle.h"
#include "kernels/reference/testing/masked_attention.h"
#include "kernels/reference/testing/packed_documents.h"

namespace ringleader::kernels::reference {
namespace {

using testing::GroupsOfRow;
using testing::KeyGroupOracle;
using testing::RandomTensor;
using testing::Tensor;

constexpr double kTolerance = 1e-4;  // fp32 logits of up to 50

struct NarrowRowPair {
  std::vector<uint8_t> queries, keys;
};

// What the ranks of a sequence agree on.
struct PickedRows {
  PickedRows(Engine& engine, const Tensor& q, const Tensor& k)
      : dims(k.heads * kScoreDims), inverses(2 * k.heads) {
    std::vector<int64_t> energy(2 * k.heads * k.head_dim);
    std::vector<float> largest(energy.size());
    RunBlockStep(engine, q.view(), k.view(),
                 DimEnergyStep{.tokens = q.tokens,
                               .rows = q.tokens,
                               .energy = energy.data(),
                               .largest = largest.data()});
    RunBlockStep(engine, q.view(), k.view(),
                 PickDimsStep{.energy = energy.data(),
                              .largest = largest.data(),
                              .dims = dims.data(),
                              .inverses = inverses.data()});
  }
  NarrowRowPair Narrow(Engine& engine, const Tensor& q, const Tensor& k) const {
    NarrowRowPair rows{std::vector<uint8_t>(q.tokens * q.heads * kScoreDims),
                       std::vector<uint8_t>(k.tokens * k.heads * kScoreDims)};
    RunBlockStep(engine, q.view(), k.view(),
                 NarrowRowsStep{.dims = dims.data(),
                                .inverses = inverses.data(),
                                .queries = rows.queries.data(),
                                .keys = rows.keys.data()});
    return rows;
  }

  std::vector<int32_t> dims;
  std::vector<float> inverses;
};

struct Choice {
  std::vector<int32_t> groups, bounds;
  int32_t capacity = 0;

  bool operator==(const Choice&) const = default;
  // Returns the groups of the sequence that a row of the choice lists.
  std::vector<int64_t> Row(const ShardLayout& layout, int heads, int64_t row) const {
    std::string wrong;
    const int64_t tiles = (layout.local_tokens() + kGroupTile - 1) / kGroupTile;
    const auto kept = GroupsOfRow(groups, bounds, capacity, layout, heads * tiles, row, &wrong);
    EXPECT_EQ(wrong, "");
    return kept;
  }
};

Choice Choose(const Tensor& q, const Tensor& k, KeyGroupGateStep step, const ShardLayout& layout,
              const std::vector<int32_t>& starts = {}, int threads = 2) {
  const Tensor local = testing::Shard(q, layout);
  const std::vector<int32_t> local_starts =
      starts.empty() ? starts : testing::ShardStarts(starts, layout);
  const Tensor local_keys = testing::Shard(k, layout);
  const int64_t tiles = (local.tokens + kGroupTile - 1) / kGroupTile;
  Engine engine(threads);
  const PickedRows picked(engine, q, k);
  const NarrowRowPair rows = picked.Narrow(engine, local, local_keys),
                      of_sequence = picked.Narrow(engine, q, k);
  Choice choice;
  step.query_layout = layout;
  choice.capacity = std::max(1, step.budget().MostGroups(q.tokens - 1, 0));
  choice.groups.resize(q.heads * tiles * choice.capacity, -1);
  choice.bounds.resize((layout.ranks + 1) * q.heads * tiles, -1);
  step.queries = rows.queries.data();
  step.keys = of_sequence.keys.data();
  step.document_starts = local_starts.empty() ? nullptr : local_starts.data();
  step.capacity = choice.capacity;
  step.groups = choice.groups.data();
  step.bounds = choice.bounds.data();
  RunBlockStep(engine, local.view(), local_keys.view(), step);
  return choice;
}

TEST(KeyGroupGateTest, IsTheOracles) {
  std::mt19937 random(3);
  for (const auto& [tokens, head_dim] :
       {std::pair(1024, 128), {1024, 64}, {1001, 96}, {130, 32}, {64, 64}, {3, 128}}) {
    const Tensor q = RandomTensor(tokens, 4, head_dim, random),
                 k = RandomTensor(tokens, 2, head_dim, random);
    const std::vector<int32_t> documents =
        testing::DocumentStarts(tokens, testing::RandomDocuments(tokens, kGroupTile, random));
    for (const bool packed : {false, true}) {
      for (const float density : {0.02f, 0.1f, 0.4f, 1.0f}) {
        SCOPED_TRACE(::testing::Message()
                     << tokens << " tokens, density " << density << (packed ? ", documents" : ""));
        const KeyGroupGateStep step = {
            .scale = 1.0f, .density = density, .budget_tokens = tokens};  // logits far apart
        const auto starts = packed ? documents : std::vector<int32_t>();
        const KeyGroupOracle oracle(q.view(), k.view(), step, starts);
        const ShardLayout whole = {.tokens = tokens};
        const Choice choice = Choose(q, k, step, whole, starts);
        EXPECT_EQ(
            oracle.Complaint(choice.groups, choice.bounds, choice.capacity, whole, kTolerance), "");
        EXPECT_EQ(Choose(q, k, step, whole, starts, /*threads=*/5), choice);
      }
    }
  }
}

TEST(KeyGroupGateTest, RanksChooseAsOneDoes) {
  std::mt19937 random(7);
  const Tensor q = RandomTensor(1024, 2, 128, random), k = RandomTensor(1024, 1, 128, random);
  const KeyGroupGateStep step = {.scale = 0.125f, .density = 0.3f, .budget_tokens = 2000};
  for (const std::vector<int32_t>& starts :
       {std::vector<int32_t>(), testing::DocumentStarts(1024, {0, 1, 203, 260, 700, 1000})}) {
    const ShardLayout whole = {.tokens = 1024};
    const Choice one = Choose(q, k, step, whole, starts);
    const KeyGroupOracle oracle(q.view(), k.view(), step, starts);
    for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      for (int rank = 0; rank < 4; ++rank) {
        const ShardLayout layout = {
            .kind = kind, .ranks = 4, .rank = rank, .stripe = 128, .tokens = 1024};
        const Choice choice = Choose(q, k, step, layout, starts);
        EXPECT_EQ(
            oracle.Complaint(choice.groups, choice.bounds, choice.capacity, layout, kTolerance),
            "");
        for (int64_t row = 0; row < 2 * 4; ++row) {
          EXPECT_EQ(choice.Row(layout, 2, row),
                    one.Row(whole, 2, row / 4 * 16 + layout.Position(row % 4 * 64) / 64));
        }
      }
    }
  }
}

// Keys that are all the same score the same: the first ones in even heads, the last in odd ones.
TEST(KeyGroupGateTest, TiesGoWhereTheHeadSays) {
  Tensor q(512, 2, 64), k(512, 1, 64);
  for (int64_t i = 0; i < 512; ++i) {
    for (int x = 0; x < 64; ++x) {
      q.at(i, 0, x) = q.at(i, 1, x) = 0.5f;
      k.at(i, 0, x) = 1.0f;
    }
  }
  const ShardLayout whole = {.tokens = 512};
  const KeyGroupGateStep step = {.scale = 1.0f, .density = 0.2f, .budget_tokens = 2048};
  const Choice choice = Choose(q, k, step, whole);
  const KeyGroupOracle oracle(std::as_const(q).view(), std::as_const(k).view(), step, {});
  EXPECT_EQ(oracle.Complaint(choice.groups, choice.bounds, choice.capacity, whole, 0.0), "");
  // a is 0.1501: a * sqrt(512 * 2048) keys are 153.7, less 64 of the tile itself 11 groups.
  EXPECT_EQ(choice.Row(whole, 2, 7), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(choice.Row(whole, 2, 8 + 7),
            (std::vector<int64_t>{45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55}));
}

// One query of a tile that looks far back, for one key, gets its group; the others look at
// themselves.
TEST(KeyGroupGateTest, FindsAKeyThatOneQueryLooksFor) {
  std::mt19937 random(5);
  const Tensor k = RandomTensor(1024, 1, 64, random);
  Tensor q = k;
  for (int x = 0; x < 64; ++x) q.at(900, 0, x) = k.at(333, 0, x);
  const ShardLayout whole = {.tokens = 1024};
  const auto row = Choose(q, k, {.scale = 0.125f, .density = 0.2f}, whole).Row(whole, 1, 14);
  EXPECT_EQ(std::ssize(row), KeyGroupBudgetOf(0.2f, 1024).MostGroups(int64_t{14} * 64, 0));
  EXPECT_TRUE(std::ranges::binary_search(row, 333 / 8));
}

// What is not a number is not preferred, whichever dimension it is in, and as many are kept.
TEST(KeyGroupGateTest, NotANumberIsTheWorst) {
  std::mt19937 random(9);
  for (const auto& [head_dim, dim] : {std::pair(64, 3), {128, 3}, {128, 77}}) {
    const Tensor q = RandomTensor(512, 1, head_dim, random);
    Tensor k = RandomTensor(512, 1, head_dim, random);
    for (int64_t j = 0; j < 200; ++j) k.at(j, 0, dim) = NAN;
    const ShardLayout whole = {.tokens = 512};
    const auto row = Choose(q, k, {.scale = 1.0f, .density = 0.3f}, whole).Row(whole, 1, 7);
    ASSERT_EQ(std::ssize(row), KeyGroupBudgetOf(0.3f, 512).MostGroups(448, 0));
    EXPECT_GE(row.front(), 200 / 8);
  }
}

}  // namespace
}  // namespace ringleader::kernels::reference
