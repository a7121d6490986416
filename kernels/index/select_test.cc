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

using CandidatesByHead = std::vector<std::vector<reference::ColumnCandidate>>;

// Step 4 on each of the simulated ranks: the device's candidates go into `selected`, the
// reference's are returned.
CandidatesByHead Nominate(const Estimate& estimate, SelectionBuffers& selected) {
  const SelectArgs& shape = selected.shape;
  const int heads = shape.heads, columns = shape.max_columns;
  const int64_t tokens = shape.layout.tokens, n = tokens / shape.layout.ranks;
  const int64_t count = int64_t{heads} * columns;
  CandidatesByHead candidates(heads);
  for (int r = 0; r < shape.layout.ranks; ++r) {
    ShardLayout layout = shape.layout;
    layout.rank = r;
    std::vector<int32_t> local(heads * n);
    for (int h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < n; ++i) {
        local[h * n + i] = estimate.column_mass[h * tokens + layout.Position(i)];
      }
      std::vector<reference::ColumnCandidate> best(columns);
      reference::CandidateColumns(&local[h * n], layout, shape.sink_tokens, columns, best.data(),
                                  TiesGoLate(h));
      candidates[h].insert(candidates[h].end(), best.begin(), best.end());
    }
    const DeviceBuffer<int32_t> column_mass(local);
    EXPECT_EQ(SelectColumnCandidates({.column_mass = column_mass.data(),
                                      .layout = layout,
                                      .heads = heads,
                                      .max_columns = columns,
                                      .sink_tokens = shape.sink_tokens,
                                      .mass = selected.candidate_mass.data() + r * count,
                                      .positions = selected.candidate_positions.data() + r * count},
                                     nullptr),
              absl::OkStatus());
  }
  return candidates;
}

// The columns of head `h` against the reference's choice among `candidates`.
void CheckColumns(const Estimate& estimate, const SelectionBuffers& selected, int h,
                  const std::vector<reference::ColumnCandidate>& candidates, float mass,
                  int32_t cap) {
  const int64_t blocks = selected.blocks();
  const int columns = selected.shape.max_columns;
  const int32_t* column_mass = &estimate.column_mass[h * selected.shape.layout.tokens];
  const int32_t* block_mass = &estimate.diagonal_mass[h * blocks];
  const int64_t total = std::accumulate(block_mass, block_mass + blocks, int64_t{0});
  std::vector<int64_t> want(columns);
  reference::Taken taken;
  const int32_t count = reference::SelectColumns(
      candidates.data(), static_cast<int64_t>(candidates.size()), total, selected.shape.sink_tokens,
      mass, std::min(cap, columns), columns, want.data(), &taken, TiesGoLate(h));
  ASSERT_EQ(selected.counts.Read()[h], count);
  const auto got = selected.positions.Read();
  ASSERT_TRUE(std::equal(want.begin(), want.end(), got.begin() + int64_t{h} * columns));
  int64_t of_columns = 0;
  for (int c = 0; c < count; ++c) of_columns += column_mass[want[c]];
  const auto masses = selected.masses.Read()[h];
  EXPECT_EQ(masses.columns, of_columns);
  EXPECT_EQ(masses.total, total);
  EXPECT_EQ(masses.columns_at_budget, taken.at_budget);
}

// The diagonals of head `h`, and their lists by residue, against the reference's. Returns the bits.
std::vector<uint64_t> CheckDiagonals(const Estimate& estimate, const SelectionBuffers& selected,
                                     int h, float mass, int32_t cap) {
  const int64_t blocks = selected.blocks(), words = (blocks + 63) / 64;
  const int ranks = selected.shape.layout.ranks;
  const int32_t* block_mass = &estimate.diagonal_mass[h * blocks];
  std::vector<uint64_t> bits(words);
  reference::Taken taken;
  const int32_t chosen = reference::SelectDiagonals(
      block_mass, static_cast<int>(blocks), selected.shape.local_blocks, mass, cap, bits.data(),
      selected.shape.diagonals_by_tiles, &taken, selected.shape.content_blocks());
  EXPECT_EQ(selected.diagonal_counts.Read()[h], chosen);
  const auto got_bits = selected.diagonals.Read();
  EXPECT_TRUE(std::equal(bits.begin(), bits.end(), got_bits.begin() + h * words));
  const auto got_offsets = selected.residue_offsets.Read();
  std::vector<int32_t> residues;
  int64_t of_diagonals = 0;
  for (int residue = 0; residue < ranks; ++residue) {
    EXPECT_EQ(got_offsets[h * (ranks + 1) + residue], static_cast<int>(residues.size()));
    for (int b = residue; b < blocks; b += ranks) {
      if ((bits[b / 64] >> (b % 64) & 1) == 0) continue;
      residues.push_back(b);
      of_diagonals += block_mass[b];
    }
  }
  EXPECT_EQ(got_offsets[h * (ranks + 1) + ranks], static_cast<int>(residues.size()));
  const auto got_residues = selected.residues.Read();
  EXPECT_TRUE(std::equal(residues.begin(), residues.end(), got_residues.begin() + h * blocks));
  const auto masses = selected.masses.Read()[h];
  EXPECT_EQ(masses.diagonals, of_diagonals);
  EXPECT_EQ(masses.diagonals_at_budget, taken.at_budget);
  return bits;
}

// Tiles that a head with these diagonals visits of each owner's keys, by looking at every pair of
// local tiles.
void AddLoad(const std::vector<uint64_t>& bits, const ShardLayout& layout, int tile,
             std::vector<int64_t>& load) {
  const int64_t n = layout.tokens / layout.ranks;
  for (int owner = 0; owner < layout.ranks; ++owner) {
    ShardLayout key = layout;
    key.rank = owner;
    for (int64_t a = 0; a < n; a += tile) {
      for (int64_t b = 0; b < n; b += tile) {
        const int64_t delta = layout.Position(a) / tile - key.Position(b) / tile;
        load[owner] += delta >= 0 && (bits[delta / 64] >> (delta % 64) & 1) != 0;
      }
    }
  }
}

// Steps 4 and 5 on simulated ranks, compared with kernels/reference.
void CheckSelection(const Estimate& estimate, int heads, ShardLayout layout, int tile,
                    int max_columns, int sink, int local_blocks, const std::vector<float>& mass,
                    const std::vector<int32_t>& max_count, bool by_tiles = false,
                    int64_t padding = 0) {
  layout.rank = layout.ranks / 2;
  SelectionBuffers selected({.diagonals_by_tiles = by_tiles,
                             .content_tokens = layout.tokens - padding,
                             .layout = layout,
                             .heads = heads,
                             .tile = tile,
                             .max_columns = max_columns,
                             .sink_tokens = sink,
                             .local_blocks = local_blocks},
                            mass, max_count);
  selected.diagonal_mass.Write(estimate.diagonal_mass);
  const CandidatesByHead candidates = Nominate(estimate, selected);
  ASSERT_EQ(Select(selected.Args(), nullptr), absl::OkStatus());
  std::vector<int64_t> load(layout.ranks);
  for (int h = 0; h < heads; ++h) {
    SCOPED_TRACE(::testing::Message() << "head " << h << " mass " << mass[h] << " cap "
                                      << max_count[h] << " ranks " << layout.ranks);
    CheckColumns(estimate, selected, h, candidates[h], mass[h], max_count[h]);
    AddLoad(CheckDiagonals(estimate, selected, h, mass[h], max_count[h]), layout, tile, load);
    if (::testing::Test::HasFatalFailure()) return;
  }
  EXPECT_EQ(selected.load.Read(), load);
}

ShardLayout Striped(int64_t tokens, int ranks) {
  return {.kind = LayoutKind::kStriped, .ranks = ranks, .stripe = 128, .tokens = tokens};
}

// Candidates of a rank need not lie at a multiple of 16 bytes: 655 columns are a density of 0.05 at
// 131,072 tokens.
TEST_F(IndexTest, AnyNumberOfColumnsMayBeSelected) {
  Estimate estimate;
  const int64_t tokens = 4096;
  for (int64_t i = 0; i < 2 * tokens; ++i) {
    estimate.column_mass.push_back(static_cast<int32_t>(random_() % 5000));
  }
  for (int64_t i = 0; i < 2 * tokens / 128; ++i) {
    estimate.diagonal_mass.push_back(static_cast<int32_t>(random_() % 200000));
  }
  for (const int columns : {1, 101, 655}) {
    for (const int ranks : {1, 4}) {
      CheckSelection(estimate, 2, Striped(tokens, ranks), 128, columns, 1, 1, {0.9f, 1.0f},
                     {columns, columns});
    }
  }
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

// 131,072 columns of the same mass, and of few masses: in an even head and in an odd one.
TEST_F(IndexTest, TiesOfLongSequencesAreTheReferences) {
  if (SmallShapes()) GTEST_SKIP() << "large";
  constexpr int64_t kTokens = 131072;
  for (const int masses : {1, 3}) {
    Estimate estimate;
    for (int64_t i = 0; i < 2 * kTokens; ++i) {
      estimate.column_mass.push_back(100 + static_cast<int32_t>(random_() % masses));
    }
    for (int64_t i = 0; i < 2 * kTokens; i += 128) {
      const auto first = estimate.column_mass.begin() + i;
      estimate.diagonal_mass.push_back(std::accumulate(first, first + 128, 0));
    }
    for (const int ranks : {1, 2, 4}) {
      SCOPED_TRACE(::testing::Message() << masses << " masses");
      CheckSelection(estimate, 2, Striped(kTokens, ranks), 128, 655, 64, 1, {1.0f, 1.0f},
                     {655, 655});
    }
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
