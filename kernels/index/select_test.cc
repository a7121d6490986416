// Selections on the device against kernels/reference.
#include "kernels/index/select.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/index/testing/index_fixture.h"
#include "kernels/reference/index/index_select.h"
#include "kernels/testing/selection_buffers.h"

namespace ringleader::kernels::index {
namespace {

using ::testing::HasSubstr;

// Steps 4 and 5 on simulated ranks, compared with kernels/reference.
void CheckSelection(const Estimate& estimate, int heads, ShardLayout layout, int tile,
                    int max_columns, int sink, int local_blocks, const std::vector<float>& mass,
                    const std::vector<int32_t>& max_count, bool by_tiles = false,
                    int64_t padding = 0) {
  const int64_t tokens = layout.tokens;
  const int ranks = layout.ranks;
  const int blocks = static_cast<int>((tokens + tile - 1) / tile);
  const int64_t n = tokens / ranks, words = (blocks + 63) / 64;
  DeviceBuffer<int32_t> all_mass(int64_t{ranks} * heads * max_columns);
  DeviceBuffer<int32_t> all_positions(int64_t{ranks} * heads * max_columns);
  std::vector<std::vector<reference::ColumnCandidate>> candidates(heads);
  for (int r = 0; r < ranks; ++r) {
    layout.rank = r;
    std::vector<int32_t> local(heads * n);
    for (int h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < n; ++i) {
        local[h * n + i] = estimate.column_mass[h * tokens + layout.Position(i)];
      }
      std::vector<reference::ColumnCandidate> best(max_columns);
      reference::CandidateColumns(&local[h * n], layout, sink, max_columns, best.data(),
                                  TiesGoLate(h));
      candidates[h].insert(candidates[h].end(), best.begin(), best.end());
    }
    const int64_t at = int64_t{r} * heads * max_columns;
    DeviceBuffer<int32_t> column_mass(local), out_mass(int64_t{heads} * max_columns),
        out_position(int64_t{heads} * max_columns);
    ASSERT_EQ(SelectColumnCandidates({.column_mass = column_mass.data(),
                                      .layout = layout,
                                      .heads = heads,
                                      .max_columns = max_columns,
                                      .sink_tokens = sink,
                                      .mass = out_mass.data(),
                                      .positions = out_position.data()},
                                     nullptr),
              absl::OkStatus());
    ASSERT_EQ(cudaMemcpy(all_mass.data() + at, out_mass.data(), out_mass.Bytes(),
                         cudaMemcpyDeviceToDevice),
              cudaSuccess);
    ASSERT_EQ(cudaMemcpy(all_positions.data() + at, out_position.data(), out_position.Bytes(),
                         cudaMemcpyDeviceToDevice),
              cudaSuccess);
  }
  layout.rank = ranks / 2;
  SelectionBuffers selected({.diagonals_by_tiles = by_tiles,
                             .content_tokens = tokens - padding,
                             .layout = layout,
                             .heads = heads,
                             .tile = tile,
                             .max_columns = max_columns,
                             .sink_tokens = sink,
                             .local_blocks = local_blocks},
                            mass, max_count);
  selected.diagonal_mass.Write(estimate.diagonal_mass);
  const auto copy = [](const DeviceBuffer<int32_t>& to, const DeviceBuffer<int32_t>& from) {
    return cudaMemcpy(to.data(), from.data(), from.Bytes(), cudaMemcpyDeviceToDevice);
  };
  ASSERT_EQ(copy(selected.candidate_mass, all_mass), cudaSuccess);
  ASSERT_EQ(copy(selected.candidate_positions, all_positions), cudaSuccess);
  ASSERT_EQ(Select(selected.Args(), nullptr), absl::OkStatus());

  const auto got_positions = selected.positions.Read();
  const auto got_bits = selected.diagonals.Read();
  const auto got_offsets = selected.residue_offsets.Read();
  const auto got_residues = selected.residues.Read();
  const auto got_masses = selected.masses.Read();
  std::vector<int64_t> expected_load(ranks);
  for (int h = 0; h < heads; ++h) {
    SCOPED_TRACE(::testing::Message() << "head " << h << " mass " << mass[h] << " cap "
                                      << max_count[h] << " ranks " << ranks);
    const int32_t* column_mass = &estimate.column_mass[h * tokens];
    const int32_t* block_mass = &estimate.diagonal_mass[int64_t{h} * blocks];
    const int64_t total = std::accumulate(block_mass, block_mass + blocks, int64_t{0});
    std::vector<int64_t> want(max_columns);
    reference::Taken of_columns, of_diagonals;
    const int32_t count = reference::SelectColumns(
        candidates[h].data(), static_cast<int64_t>(candidates[h].size()), total, sink, mass[h],
        std::min(max_count[h], max_columns), max_columns, want.data(), &of_columns, TiesGoLate(h));
    ASSERT_EQ(selected.counts.Read()[h], count);
    ASSERT_TRUE(
        std::equal(want.begin(), want.end(), got_positions.begin() + int64_t{h} * max_columns));
    int64_t columns_mass = 0;
    for (int c = 0; c < count; ++c) columns_mass += column_mass[want[c]];
    EXPECT_EQ(got_masses[h].columns, columns_mass);
    EXPECT_EQ(got_masses[h].total, total);

    std::vector<uint64_t> want_bits(words);
    const int32_t chosen = reference::SelectDiagonals(
        block_mass, blocks, local_blocks, mass[h], max_count[h], want_bits.data(), by_tiles,
        &of_diagonals, (tokens - padding + tile - 1) / tile);
    EXPECT_EQ(got_masses[h].columns_at_budget, of_columns.at_budget);
    EXPECT_EQ(got_masses[h].diagonals_at_budget, of_diagonals.at_budget);
    EXPECT_EQ(selected.diagonal_counts.Read()[h], chosen);
    ASSERT_TRUE(std::equal(want_bits.begin(), want_bits.end(), got_bits.begin() + h * words));
    const auto has = [&](int64_t delta) {
      return delta >= 0 && (want_bits[delta / 64] >> (delta % 64) & 1) != 0;
    };
    std::vector<int32_t> want_residues;
    int64_t diagonals_mass = 0;
    for (int residue = 0; residue < ranks; ++residue) {
      EXPECT_EQ(got_offsets[h * (ranks + 1) + residue], static_cast<int>(want_residues.size()));
      for (int b = residue; b < blocks; b += ranks) {
        if (!has(b)) continue;
        want_residues.push_back(b);
        diagonals_mass += block_mass[b];
      }
    }
    EXPECT_EQ(got_offsets[h * (ranks + 1) + ranks], static_cast<int>(want_residues.size()));
    EXPECT_TRUE(std::equal(want_residues.begin(), want_residues.end(),
                           got_residues.begin() + int64_t{h} * blocks));
    EXPECT_EQ(got_masses[h].diagonals, diagonals_mass);
    // Load by looking at every pair of local tiles.
    for (int owner = 0; owner < ranks; ++owner) {
      ShardLayout key = layout;
      key.rank = owner;
      for (int64_t a = 0; a < n; a += tile) {
        for (int64_t b = 0; b < n; b += tile) {
          expected_load[owner] += has(layout.Position(a) / tile - key.Position(b) / tile);
        }
      }
    }
  }
  EXPECT_EQ(selected.load.Read(), expected_load);
}

ShardLayout Striped(int64_t tokens, int ranks) {
  return {.kind = LayoutKind::kStriped, .ranks = ranks, .stripe = 128, .tokens = tokens};
}

TEST_F(IndexTest, SelectionEqualsTheReference) {
  const std::vector<float> mass = {0.9f, 0.5f, 1.0f, 0.01f, 0.95f, 0.9f, 1.0f, 0.9999f};
  const std::vector<int32_t> caps = {512, 7, 100, 512, 300, 1, 512, 512};
  const int heads = static_cast<int>(mass.size());
  for (const int64_t tokens : {int64_t{4096}, int64_t{33280}}) {
    if (SmallShapes() && tokens > 4096) continue;
    for (const int kind : {0, 1, 2, 3}) {
      Estimate estimate;
      const int64_t blocks = tokens / 128;
      const auto draw = [&]() -> int32_t {
        const uint64_t bits = random_();
        switch (kind) {
          case 0:  // every magnitude
            return static_cast<int32_t>((bits >> 40) & ((1u << (bits % 17)) - 1));
          case 1:  // few values: ties everywhere
            return static_cast<int32_t>(bits % 3);
          case 2:  // a few heavy ones
            return bits % 97 == 0 ? static_cast<int32_t>(bits >> 50) : 1;
          default:
            return 0;
        }
      };
      for (int64_t i = 0; i < heads * tokens; ++i) estimate.column_mass.push_back(draw());
      if (kind == 0) estimate.column_mass[3 * tokens + 999] = (1 << 30) - 12345;
      for (int64_t i = 0; i < heads * blocks; ++i) {
        const auto first = estimate.column_mass.begin() + i * 128;
        estimate.diagonal_mass.push_back(std::accumulate(first, first + 128, 0));
      }
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, masses of kind " << kind);
      for (const int ranks : {1, 2}) {
        CheckSelection(estimate, heads, Striped(tokens, ranks), 128, 512, 64, 1, mass, caps);
        CheckSelection(estimate, heads, Striped(tokens, ranks), 128, 512, 64, 1, mass,
                       {16000, 70, 1000, 512, 300, 1, 20000, 4000}, /*by_tiles=*/true);
        CheckSelection(estimate, heads, Striped(tokens, ranks), 128, 512, 64, 1, mass,
                       {16000, 70, 1000, 512, 300, 1, 20000, 4000}, /*by_tiles=*/true,
                       /*padding=*/tokens / 5);
      }
    }
  }
}

// Loads of all owners, and a device memory bitmap and uncached masses where they are needed.
TEST_F(IndexTest, SelectionOnEveryLayoutAndOnLongSequences) {
  std::vector<ShardLayout> layouts;
  const int64_t tokens = SmallShapes() ? 4096 : 32768;
  for (const int ranks : {2, 4, 128}) {
    layouts.push_back({.kind = LayoutKind::kContiguous, .ranks = ranks, .tokens = tokens});
    layouts.push_back({.kind = LayoutKind::kZigzag, .ranks = ranks, .tokens = tokens});
    layouts.push_back(Striped(tokens, ranks));
    layouts.push_back(
        {.kind = LayoutKind::kStriped, .ranks = ranks, .stripe = 256, .tokens = tokens});
  }
  layouts.push_back(Striped(int64_t{1} << 21, 4));
  for (const ShardLayout& layout : layouts) {
    if (SmallShapes() && layout.ranks > 2) continue;
    SCOPED_TRACE(::testing::Message() << static_cast<int>(layout.kind) << " " << layout.stripe);
    Estimate estimate;
    for (int64_t i = 0; i < layout.tokens; ++i) {
      estimate.column_mass.push_back(static_cast<int32_t>(random_() % 700));
    }
    for (int64_t i = 0; i < layout.tokens; i += 128) {
      const auto first = estimate.column_mass.begin() + i;
      estimate.diagonal_mass.push_back(std::accumulate(first, first + 128, 0));
    }
    CheckSelection(estimate, 1, layout, 128, 512, 64, 1, {0.6f}, {16384});
    CheckSelection(estimate, 1, layout, 128, 512, 64, 1, {1.0f}, {300});
  }
}

TEST_F(IndexTest, SelectionFromRealEstimates) {
  const int64_t tokens = SmallShapes() ? 1024 : 8192;
  const Case c = {tokens, 16, 2, 128, Last(tokens, 64)};
  const auto q = Normal(c.query_positions.size() * c.heads * c.head_dim, 3.0f);
  const auto k = Normal(c.tokens * c.kv_heads * c.head_dim, 1.0f);
  const Estimate estimate = RunEstimate(c, q, k, LayoutKind::kStriped, 4);
  CheckSelection(estimate, c.heads, Striped(c.tokens, 4), c.tile, 1024, 64, 1,
                 std::vector<float>(c.heads, 0.9f), std::vector<int32_t>(c.heads, 1000));
}

TEST(IndexArgumentsTest, ErrorsNameTheArgumentAndWhatIsAllowed) {
  EstimateArgs args;
  args.q = {.tokens = 64, .heads = 4, .head_dim = 96};
  EXPECT_THAT(EstimateRowMax(args, nullptr).message(), HasSubstr("head_dim is 96; 64 and 128"));
  args.q.head_dim = args.k.head_dim = 64;
  args.k.heads = 3;
  EXPECT_THAT(EstimateRowMax(args, nullptr).message(), HasSubstr("multiple of k's"));
  ColumnCandidatesArgs candidates;
  candidates.heads = 1;
  candidates.max_columns = 8;
  candidates.sink_tokens = 9;
  EXPECT_THAT(SelectColumnCandidates(candidates, nullptr).message(),
              HasSubstr("sink_tokens is 9; allowed are multiples of 1 from 0 to 8"));
  SelectArgs select;
  select.heads = select.max_columns = 1;
  select.layout.tokens = 128;
  EXPECT_THAT(Select(select, nullptr).message(), HasSubstr("column_budgets: mass and max_count"));
}

}  // namespace
}  // namespace ringleader::kernels::index
