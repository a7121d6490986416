// The choice of groups of keys on the device against the fp64 oracle, and on several ranks against
// one; and its lists against the CPU engine's.
#include "kernels/index/groups/key_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/index/gates/block_steps.h"
#include "kernels/index/groups/group_lists.h"
#include "kernels/index/testing/gate_rows.h"
#include "kernels/reference/gates/key_group_gate.h"
#include "kernels/reference/testing/key_group_oracle.h"
#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"

namespace ringleader::kernels::index {
namespace {

using Bf16 = __nv_bfloat16;
using reference::testing::GroupsOfRow;
using reference::testing::KeyGroupOracle;
using ::testing::HasSubstr;

class KeyGroupsTest : public GpuTest {
 protected:
  // Values of `of_normal`, a function of normal ones.
  template <typename Function>
  Rows Random(int64_t tokens, int heads, int head_dim, const Function& of_normal) {
    std::normal_distribution<float> normal;
    Rows rows{.floats = {}, .bf16 = {}, .tokens = tokens, .heads = heads, .head_dim = head_dim};
    for (int64_t i = 0; i < tokens * rows.width(); ++i) {
      rows.bf16.push_back(__float2bfloat16_rn(of_normal(normal(random_))));
      rows.floats.push_back(__bfloat162float(rows.bf16.back()));
    }
    return rows;
  }
  // Whole numbers of up to 7 are exact in e4m3, and so are the sums of 64 of their products, below
  // 2^13, in the tensor cores: there is one right choice.
  Rows RandomWhole(int64_t tokens, int heads, int head_dim) {
    return Random(tokens, heads, head_dim, [](float normal) {
      return std::clamp(std::nearbyint(2.5f * normal), -7.0f, 7.0f);
    });
  }

  // The sequence's rows, narrow, and what to narrow a rank's own by.
  struct Narrowed {
    Narrowed(const Rows& q, const Rows& k)
        : dims(k.heads * kScoreDims),
          inverses(2 * k.heads),
          queries(q.tokens * q.heads * kScoreDims),
          keys(k.tokens * k.heads * kScoreDims) {
      const DeviceBuffer<Bf16> q_rows(q.bf16), k_rows(k.bf16);
      const DeviceBuffer<int64_t> energy(int64_t{2} * k.width());
      const DeviceBuffer<float> largest(int64_t{2} * k.width());
      const auto run = [&](const BlockStep& step) {
        EXPECT_EQ(RunBlockStep(q.ViewOf(q_rows, q.tokens), k.ViewOf(k_rows, k.tokens), step,
                               nullptr, nullptr),
                  absl::OkStatus());
      };
      run(DimEnergyStep{.tokens = q.tokens,
                        .rows = q.tokens,
                        .energy = energy.data(),
                        .largest = largest.data()});
      run(PickDimsStep{.energy = energy.data(),
                       .largest = largest.data(),
                       .dims = dims.data(),
                       .inverses = inverses.data()});
      run(Step(queries, keys));
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    NarrowRowsStep Step(const DeviceBuffer<uint8_t>& of_queries,
                        const DeviceBuffer<uint8_t>& of_keys, int32_t tile = kGroupTile) const {
      return {.dims = dims.data(),
              .inverses = inverses.data(),
              .rows = {tile},
              .queries = of_queries.data(),
              .keys = of_keys.data()};
    }

    const DeviceBuffer<int32_t> dims;
    const DeviceBuffer<float> inverses;
    const DeviceBuffer<uint8_t> queries, keys;
  };

  // What the rank of `layout` chooses. step.head_halves is in the host's memory, as the oracle
  // reads it.
  static std::vector<uint32_t> Choose(const Rows& q, const Rows& k, KeyGroupGateStep step,
                                      const ShardLayout& layout,
                                      const std::vector<int32_t>& starts) {
    const int64_t n = layout.local_tokens();
    const Narrowed narrowed(q, k);
    const DeviceBuffer<Bf16> queries(q.Shard(layout)), local_keys(k.Shard(layout));
    const DeviceBuffer<uint8_t> narrow(SpreadRows{step.tile}.Rows(n) * q.heads * kScoreDims),
        narrow_keys(n * k.heads * kScoreDims);
    const DeviceBuffer<int32_t> local_starts(
        starts.empty() ? std::vector<int32_t>(1) : reference::testing::ShardStarts(starts, layout));
    step.query_layout = layout;
    const DeviceBuffer<int64_t> of_tiles(GroupRows(layout, step.tile));
    const DeviceBuffer<uint32_t> chosen(q.heads / step.heads_together *
                                        GroupRows(layout, step.tile).back());
    step.queries = narrow.data();
    step.keys = narrowed.keys.data();
    step.document_starts = starts.empty() ? nullptr : local_starts.data();
    std::vector<int32_t> of_heads(q.heads);
    if (step.head_halves != nullptr) std::copy_n(step.head_halves, q.heads, of_heads.begin());
    const DeviceBuffer<int32_t> halves(of_heads);
    if (step.head_halves != nullptr) step.head_halves = halves.data();
    step.rows = of_tiles.data();
    step.chosen = chosen.data();
    const TokenMajor<const Bf16> q_view = q.ViewOf(queries, n), k_view = k.ViewOf(local_keys, n);
    EXPECT_EQ(RunBlockStep(q_view, k_view, narrowed.Step(narrow, narrow_keys, step.tile), nullptr,
                           nullptr),
              absl::OkStatus());
    const DeviceBuffer<char> workspace(
        static_cast<int64_t>(BlockStepWorkspaceBytes(q_view, k_view, step)));
    EXPECT_EQ(RunBlockStep(q_view, k_view, step, workspace.data(), nullptr), absl::OkStatus());
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return chosen.Read();
  }

  static void ExpectRanksChoose(const Rows& q, const Rows& k, const KeyGroupGateStep& step,
                                const std::vector<int32_t>& starts,
                                const std::vector<uint32_t>& one) {
    const int64_t tiles = q.tokens / step.tile / 4;
    for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      for (int rank = 0; rank < 4; ++rank) {
        const ShardLayout layout = {
            .kind = kind, .ranks = 4, .rank = rank, .stripe = kGroupTile, .tokens = q.tokens};
        const std::vector<uint32_t> chosen = Choose(q, k, step, layout, starts);
        for (int64_t row = 0; row < q.heads / step.heads_together * tiles; ++row) {
          const int head = static_cast<int>(row / tiles);
          const int64_t tile = layout.Position(row % tiles * step.tile) / step.tile;
          ASSERT_EQ(GroupsOfRow(chosen, layout, head, row % tiles, step.tile),
                    GroupsOfRow(one, {.tokens = q.tokens}, head, tile, step.tile))
              << "layout " << static_cast<int>(kind) << ", rank " << rank << ", row " << row;
        }
      }
    }
  }

  std::mt19937 random_{17};
};

TEST_F(KeyGroupsTest, AreTheOraclesAndOnRanksThoseOfOne) {
  for (const auto& [tokens, heads, head_dim] :
       {std::tuple{1000, 4, 64}, {1024, 2, 128}, {2560, 4, 128}, {3072, 2, 64}, {40, 2, 64}}) {
    if (SmallShapes() && tokens > 1024) continue;
    const Rows q = RandomWhole(tokens, heads, head_dim),
               k = RandomWhole(tokens, heads / 2, head_dim);
    const auto documents = reference::testing::DocumentStarts(
        tokens, reference::testing::RandomDocuments(tokens, kGroupTile, random_));
    for (const auto& [packed, tile, together] : reference::testing::kAskedChoices) {
      for (const float density : {0.1f, 0.35f, 1.0f}) {
        SCOPED_TRACE(::testing::Message()
                     << tokens << " tokens, density " << density << (packed ? ", documents" : "")
                     << ", tiles of " << tile << ", heads together " << together);
        const KeyGroupGateStep step = {.tile = tile,
                                       .scale = 0.7f,
                                       .density = density,
                                       .budget_tokens = tokens + 500,
                                       .heads_together = together};
        const auto starts = packed ? documents : std::vector<int32_t>();
        const std::vector<uint32_t> one = Choose(q, k, step, {.tokens = tokens}, starts);
        EXPECT_EQ(KeyGroupOracle(q.View(), k.View(), step, starts)
                      .Complaint(one, {.tokens = tokens}, 0.0),
                  "");
        if (tokens % (8 * kGroupTile) == 0) ExpectRanksChoose(q, k, step, starts, one);
      }
    }
  }
}

TEST_F(KeyGroupsTest, AreTheOraclesWhereASampleWillDo) {
  for (const reference::testing::SampledChoice& choice : reference::testing::kSampledChoices) {
    const auto& [tokens, asked] = choice;
    if (SmallShapes() && tokens > 2048) continue;
    SCOPED_TRACE(::testing::Message() << tokens << " tokens, tiles of " << asked.tile
                                      << ", heads together " << asked.heads_together);
    const Rows q = RandomWhole(tokens, asked.heads_together, 64), k = RandomWhole(tokens, 1, 64);
    const auto starts = asked.packed ? reference::testing::DocumentStarts(
                                           tokens, reference::testing::SampledDocuments(choice))
                                     : std::vector<int32_t>();
    const KeyGroupGateStep step = {.tile = asked.tile,
                                   .scale = 0.7f,
                                   .density = reference::testing::kSampledDensity,
                                   .budget_tokens = tokens,
                                   .heads_together = asked.heads_together};
    const std::vector<uint32_t> one = Choose(q, k, step, {.tokens = tokens}, starts);
    const KeyGroupOracle oracle(q.View(), k.View(), step, starts);
    EXPECT_GT(oracle.ShareSampled(), 0.1);
    EXPECT_LT(oracle.ShareSampled(), 0.9);
    EXPECT_EQ(oracle.Complaint(one, {.tokens = tokens}, 0.0), "");
    if (tokens % (8 * kGroupTile) == 0) ExpectRanksChoose(q, k, step, starts, one);
  }
}

TEST_F(KeyGroupsTest, HeadsHaveBudgetsOfTheirOwn) {
  const Rows q = RandomWhole(1024, 4, 64), k = RandomWhole(1024, 2, 64);
  const std::vector<int32_t> halves = {1, 3, 2, 3}, of_pairs = {1, 1, 3, 3};
  for (const int together : {1, 2}) {
    for (const float density : {0.1f, 0.3f, 0.6f}) {
      const KeyGroupGateStep step = {.scale = 1.0f,
                                     .density = density,
                                     .budget_tokens = 1024,
                                     .heads_together = together,
                                     .head_halves = (together == 1 ? halves : of_pairs).data()};
      const std::vector<uint32_t> one = Choose(q, k, step, {.tokens = 1024}, {});
      EXPECT_EQ(KeyGroupOracle(q.View(), k.View(), step, {}).Complaint(one, {.tokens = 1024}, 0.0),
                "");
      ExpectRanksChoose(q, k, step, {}, one);
    }
  }
}

// Any values: what the tensor cores lose of sums may change the order, and no more.
TEST_F(KeyGroupsTest, AreTheOraclesWithinTheRoundingOfSums) {
  for (const int head_dim : {64, 128}) {
    const auto as_is = [](float normal) { return normal; };
    const Rows q = Random(1024, 4, head_dim, as_is), k = Random(1024, 2, head_dim, as_is);
    for (const auto& [density, move] :
         {std::pair{0.1f, 1.0f}, {0.35f, 1.0f}, {0.35f, 0.8f}, {0.35f, 1.4f}}) {
      const KeyGroupGateStep step = {.scale = 0.7f,
                                     .density = density,
                                     .budget_tokens = 1024,
                                     .move = move,
                                     .tolerance = 0.15f};
      const std::vector<uint32_t> one = Choose(q, k, step, {.tokens = 1024}, {});
      const KeyGroupOracle oracle(q.View(), k.View(), step, {});
      EXPECT_LT(oracle.TensorCoreTolerance(), 2.0);  // of scores of up to 60
      EXPECT_EQ(oracle.Complaint(one, {.tokens = 1024}, oracle.TensorCoreTolerance()), "");
      ExpectRanksChoose(q, k, step, {}, one);
    }
  }
}

// What is not a number is not preferred, whichever dimension it is in, and as many are kept.
TEST_F(KeyGroupsTest, NotANumberIsTheWorst) {
  const Rows q = RandomWhole(512, 1, 128);
  for (const int dim : {3, 77}) {
    Rows k = RandomWhole(512, 1, 128);
    for (int64_t i = 0; i < 200; ++i) k.bf16[i * 128 + dim] = __float2bfloat16_rn(NAN);
    const ShardLayout whole = {.tokens = 512};
    const auto row =
        GroupsOfRow(Choose(q, k, {.scale = 1.0f, .density = 0.3f}, whole, {}), whole, 0, 7);
    ASSERT_EQ(std::ssize(row), KeyGroupBudgetOf(0.3f, 512).MostGroups(448, 0));
    EXPECT_GE(row.front(), 200 / 8);
  }
}

// Small whole numbers have exact products, and most groups score as others do: there is one right
// choice.
TEST_F(KeyGroupsTest, TiesGoWhereTheyShould) {
  constexpr int64_t kTokens = 1024;
  std::uniform_int_distribution<int> few(-1, 1);
  Rows q{.floats = {}, .bf16 = {}, .tokens = kTokens, .heads = 2, .head_dim = 64}, k = q;
  k.heads = 1;
  for (Rows* const rows : {&q, &k}) {
    for (int64_t i = 0; i < kTokens * rows->width(); ++i) {
      const bool is_zero = rows == &k && i % 64 > 2;
      const float value = is_zero ? 0.0f : static_cast<float>(few(random_));
      rows->floats.push_back(value);
      rows->bf16.push_back(__float2bfloat16_rn(value));
    }
  }
  for (const float density : {0.1f, 0.5f}) {
    const KeyGroupGateStep step = {.scale = 1.0f, .density = density, .budget_tokens = kTokens};
    const std::vector<uint32_t> one = Choose(q, k, step, {.tokens = kTokens}, {});
    EXPECT_EQ(KeyGroupOracle(q.View(), k.View(), step, {}).Complaint(one, {.tokens = kTokens}, 0.0),
              "");
    ExpectRanksChoose(q, k, step, {}, one);
  }
}

// Tiles whose scores take several launches, and chunks of keys: each head's rows are those that it
// has alone. The last head is an even one, so that its ties go as they do alone.
TEST_F(KeyGroupsTest, SlabsAreWhole) {
  if (SmallShapes()) GTEST_SKIP() << "large";
  constexpr int64_t kTokens = 65536, kTiles = kTokens / kGroupTile;
  constexpr int kHeads = 17;
  const Rows q = RandomWhole(kTokens, kHeads, 64), k = RandomWhole(kTokens, 1, 64);
  const KeyGroupGateStep step = {.scale = 0.125f, .density = 0.05f};
  const ShardLayout whole = {.tokens = kTokens};
  const std::vector<uint32_t> all = Choose(q, k, step, whole, {});
  Rows last{.floats = {}, .bf16 = {}, .tokens = kTokens, .heads = 1, .head_dim = 64};
  for (int64_t i = 0; i < kTokens; ++i) {
    const auto row = q.bf16.begin() + ((i + 1) * kHeads - 1) * 64;
    last.bf16.insert(last.bf16.end(), row, row + 64);
  }
  const std::vector<uint32_t> alone = Choose(last, k, step, whole, {});
  for (int64_t tile = 0; tile < kTiles; ++tile) {
    const auto kept = GroupsOfRow(alone, whole, 0, tile);
    ASSERT_EQ(std::ssize(kept), KeyGroupBudgetOf(0.05f, kTokens).MostGroups(tile * kGroupTile, 0));
    ASSERT_EQ(kept, GroupsOfRow(all, whole, kHeads - 1, tile)) << tile;
  }
}

// Rows longer than a block of threads takes at a time, and with fewer words than one, are listed
// whole.
TEST_F(KeyGroupsTest, ListsAreTheCpuEngines) {
  std::uniform_int_distribution<uint32_t> any;
  constexpr int kHeads = 3;
  for (const auto& [tokens, ranks, queries] : {std::tuple{40'000, 1, kGroupTile},
                                               {40'960, 4, kGroupTile},
                                               {1000, 1, kGroupTile},
                                               {40, 1, kGroupTile},
                                               {10'000, 1, 16},
                                               {10'240, 4, 16}}) {
    if (SmallShapes() && tokens > 1024) continue;
    for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      const ShardLayout layout = {
          .kind = kind, .ranks = ranks, .rank = ranks - 1, .stripe = kGroupTile, .tokens = tokens};
      const std::vector<int64_t> of_tiles = GroupRows(layout, queries);
      std::vector<uint32_t> chosen(kHeads * of_tiles.back());
      for (uint32_t& word : chosen) word = any(random_) & any(random_);
      // Groups from the tile on are none that a choice keeps.
      for (size_t tile = 0; tile + 1 < of_tiles.size(); ++tile) {
        const int64_t groups = layout.Position(static_cast<int64_t>(tile) * queries) / kGroupKeys;
        if (groups % 32 == 0) continue;
        for (int head = 0; head < kHeads; ++head) {
          chosen[head * of_tiles.back() + of_tiles[tile + 1] - 1] &= (1u << groups % 32) - 1;
        }
      }
      const auto expected = reference::ListGroups(
          {.rows = of_tiles.data(), .chosen = chosen.data(), .tile = queries}, layout, kHeads);
      const DeviceBuffer<int64_t> gpu_rows(of_tiles);
      const DeviceBuffer<uint32_t> gpu_chosen(chosen);
      const DeviceBuffer<int32_t> groups(std::ssize(expected.groups)),
          bounds(std::ssize(expected.bounds));
      const GroupLists lists = {groups.data(), bounds.data(), expected.lists.rows,
                                expected.lists.capacity};
      ASSERT_EQ(ListGroups({.rows = gpu_rows.data(), .chosen = gpu_chosen.data(), .tile = queries},
                           layout, kHeads, lists, nullptr),
                absl::OkStatus());
      ASSERT_EQ(bounds.Read(), expected.bounds);
      const std::vector<int32_t> listed = groups.Read(), ends = bounds.Read();
      for (int64_t row = 0; row < lists.rows; ++row) {
        const int64_t first = row * lists.capacity, count = ends[ranks * lists.rows + row];
        ASSERT_TRUE(std::equal(listed.begin() + first, listed.begin() + first + count,
                               expected.groups.begin() + first))
            << "row " << row;
      }
    }
  }
}

TEST(KeyGroupsArgumentsTest, ErrorsNameTheArgumentAndWhatIsAllowed) {
  const auto message = [](KeyGroupGateStep step) {
    if (step.query_layout.tokens == 0) step.query_layout.tokens = 1024;
    return std::string(ChooseKeyGroups(1, 1, step, nullptr, nullptr).message());
  };
  EXPECT_THAT(message({}), HasSubstr("scale is 0; it must be above 0"));
  EXPECT_THAT(message({.scale = 1.0f, .density = 1.5f}),
              HasSubstr("density is 1.5; it must be above 0 and at most 1"));
  EXPECT_THAT(
      message(
          {.query_layout = {.kind = LayoutKind::kStriped, .ranks = 4, .stripe = 32, .tokens = 4096},
           .scale = 1.0f}),
      HasSubstr("tokens of a chunk of the layout is 32"));
  EXPECT_THAT(message({.scale = 1.0f, .heads_together = 3}), HasSubstr("heads_together is 3"));
  EXPECT_THAT(message({.scale = 1.0f, .heads_together = 2}),
              HasSubstr("heads of q for each of k is 1"));
  EXPECT_THAT(message({.tile = 32, .scale = 1.0f}),
              HasSubstr("tile is 32; 64 and 16 are supported"));
  EXPECT_THAT(message({.scale = 1.0f}), HasSubstr("rows"));
}

}  // namespace
}  // namespace ringleader::kernels::index
