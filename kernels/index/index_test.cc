// The index on the device: estimates against double precision, lists against kernels/reference, and
// one rank against several.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "kernels/index/estimate.h"
#include "kernels/index/gates/block_steps.h"
#include "kernels/index/select.h"
#include "kernels/reference/index/index_select.h"
#include "kernels/reference/tiles/block_gate.h"
#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"
#include "kernels/testing/selection_buffers.h"

namespace ringleader::kernels::index {
namespace {

using Bf16 = __nv_bfloat16;
using ::testing::HasSubstr;

struct Case {
  int64_t tokens;
  int heads, kv_heads, head_dim;
  std::vector<int64_t> query_positions;
  int tile = 128;
  std::vector<int64_t> query_starts = {};  // of the queries' documents; empty: one document
};

// The last `count` queries of the sequence.
std::vector<int64_t> Last(int64_t tokens, int count) {
  std::vector<int64_t> positions(count);
  std::iota(positions.begin(), positions.end(), tokens - count);
  return positions;
}

// Runs of `run` queries spread over the sequence.
std::vector<int64_t> Spread(int64_t tokens, int count, int run) {
  std::vector<int64_t> positions;
  for (int r = 0; r < count / run; ++r) {
    const int64_t start = (r + 1) * tokens / (count / run) - run;
    for (int i = 0; i < run; ++i) positions.push_back(start + i);
  }
  return positions;
}

// Where the documents that begin at `firsts` start for each of the positions.
std::vector<int64_t> StartsOf(const std::vector<int64_t>& positions,
                              const std::vector<int64_t>& firsts) {
  std::vector<int64_t> starts;
  starts.reserve(positions.size());
  for (const int64_t position : positions) {
    starts.push_back(*(std::upper_bound(firsts.begin(), firsts.end(), position) - 1));
  }
  return starts;
}

struct Estimate {
  std::vector<int32_t> column_mass;    // [heads, tokens]
  std::vector<int32_t> diagonal_mass;  // [heads, blocks]
};

class IndexTest : public GpuTest {
 protected:
  // Steps 1 to 3 on `ranks` simulated ranks, reduced on the host as the ranks would.
  Estimate RunEstimate(const Case& c, const std::vector<Bf16>& q, const std::vector<Bf16>& k,
                       LayoutKind kind, int ranks) {
    const int64_t n = c.tokens / ranks, queries = static_cast<int64_t>(c.query_positions.size());
    const int64_t blocks = (c.tokens + c.tile - 1) / c.tile;
    const int64_t row = int64_t{c.kv_heads} * c.head_dim;
    DeviceBuffer<Bf16> gpu_q(q);
    DeviceBuffer<int64_t> positions(c.query_positions);
    const DeviceBuffer<int64_t> starts(c.query_starts.empty() ? c.query_positions : c.query_starts);
    struct Rank {
      ShardLayout layout;
      DeviceBuffer<Bf16> k;
      DeviceBuffer<float> row_max;
      DeviceBuffer<int64_t> row_sum;
      DeviceBuffer<float> run_sums;
      DeviceBuffer<int32_t> column_mass, diagonal_mass;
      EstimateArgs args;
    };
    std::vector<Rank> all(ranks);
    for (int r = 0; r < ranks; ++r) {
      Rank& rank = all[r];
      rank.layout = {.kind = kind, .ranks = ranks, .rank = r, .stripe = 128, .tokens = c.tokens};
      std::vector<Bf16> shard(n * row);
      for (int64_t i = 0; i < n; ++i) {
        std::copy_n(k.begin() + rank.layout.Position(i) * row, row, shard.begin() + i * row);
      }
      rank.k = DeviceBuffer<Bf16>(shard);
      rank.row_max = DeviceBuffer<float>(c.heads * queries);
      rank.row_sum = DeviceBuffer<int64_t>(c.heads * queries);
      rank.run_sums = DeviceBuffer<float>(c.heads * queries * RunsOf(n));
      rank.column_mass = DeviceBuffer<int32_t>(c.heads * n);
      rank.diagonal_mass = DeviceBuffer<int32_t>(c.heads * blocks);
      rank.args = {.q = {gpu_q.data(), queries, c.heads, c.head_dim, int64_t{c.heads} * c.head_dim,
                         c.head_dim},
                   .query_positions = positions.data(),
                   .query_starts = c.query_starts.empty() ? nullptr : starts.data(),
                   .k = {rank.k.data(), n, c.kv_heads, c.head_dim, row, c.head_dim},
                   .key_layout = rank.layout,
                   .tile = c.tile,
                   .scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim)),
                   .row_max = rank.row_max.data(),
                   .row_sum = rank.row_sum.data(),
                   .run_sums = rank.run_sums.data(),
                   .column_mass = rank.column_mass.data(),
                   .diagonal_mass = rank.diagonal_mass.data()};
      EXPECT_EQ(EstimateRowMax(rank.args, nullptr), absl::OkStatus());
    }
    Reduce(all, &Rank::row_max, [](float a, float b) { return std::max(a, b); });
    for (Rank& rank : all) EXPECT_EQ(EstimateRowSum(rank.args, nullptr), absl::OkStatus());
    Reduce(all, &Rank::row_sum, std::plus<int64_t>());
    for (Rank& rank : all) EXPECT_EQ(EstimateMass(rank.args, nullptr), absl::OkStatus());
    Reduce(all, &Rank::diagonal_mass, std::plus<int32_t>());

    Estimate estimate = {.column_mass = std::vector<int32_t>(c.heads * c.tokens),
                         .diagonal_mass = all[0].diagonal_mass.Read()};
    for (Rank& rank : all) {
      const auto local = rank.column_mass.Read();
      for (int h = 0; h < c.heads; ++h) {
        for (int64_t i = 0; i < n; ++i) {
          estimate.column_mass[h * c.tokens + rank.layout.Position(i)] = local[h * n + i];
        }
      }
    }
    return estimate;
  }

  // Steps 4 and 5 on simulated ranks, compared with kernels/reference.
  void CheckSelection(const Estimate& estimate, int heads, ShardLayout layout, int tile,
                      int max_columns, int sink, int local_blocks, const std::vector<float>& mass,
                      const std::vector<int32_t>& max_count, bool by_tiles = false);

 private:
  template <typename Rank, typename T, typename Combine>
  static void Reduce(std::vector<Rank>& ranks, DeviceBuffer<T> Rank::*buffer, Combine combine) {
    std::vector<T> total = (ranks[0].*buffer).Read();
    for (size_t r = 1; r < ranks.size(); ++r) {
      const std::vector<T> other = (ranks[r].*buffer).Read();
      for (size_t i = 0; i < total.size(); ++i) total[i] = combine(total[i], other[i]);
    }
    for (Rank& rank : ranks) (rank.*buffer).Write(total);
  }
};

Estimate DoubleEstimate(const Case& c, const std::vector<Bf16>& q, const std::vector<Bf16>& k) {
  const int64_t queries = static_cast<int64_t>(c.query_positions.size());
  const int64_t blocks = (c.tokens + c.tile - 1) / c.tile;
  std::vector<double> columns(c.heads * c.tokens), diagonals(c.heads * blocks), p(c.tokens);
  std::vector<float> keys(k.size());
  for (size_t i = 0; i < k.size(); ++i) keys[i] = __bfloat162float(k[i]);
  for (int h = 0; h < c.heads; ++h) {
    for (int64_t e = 0; e < queries; ++e) {
      const int64_t visible = std::min(c.tokens, c.query_positions[e] + 1);
      const int64_t start = c.query_starts.empty() ? 0 : c.query_starts[e];
      double max = -INFINITY, sum = 0;
      for (int64_t t = start; t < visible; ++t) {
        const float* key = &keys[(t * c.kv_heads + h / (c.heads / c.kv_heads)) * c.head_dim];
        double dot = 0;
        for (int d = 0; d < c.head_dim; ++d) {
          dot += __bfloat162float(q[(e * c.heads + h) * c.head_dim + d]) * key[d];
        }
        p[t] = dot / std::sqrt(static_cast<double>(c.head_dim));
        max = std::max(max, p[t]);
      }
      for (int64_t t = start; t < visible; ++t) sum += p[t] = std::exp(p[t] - max);
      for (int64_t t = start; t < visible; ++t) {
        columns[h * c.tokens + t] += p[t] / sum;
        diagonals[h * blocks + c.query_positions[e] / c.tile - t / c.tile] += p[t] / sum;
      }
    }
  }
  Estimate out;
  for (const double m : columns) out.column_mass.push_back(std::lround(m * (1 << kMassBits)));
  for (const double m : diagonals) out.diagonal_mass.push_back(std::lround(m * (1 << kMassBits)));
  return out;
}

void ExpectNear(const std::vector<int32_t>& actual, const std::vector<int32_t>& expected,
                double units, const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], units + 2e-4 * expected[i]) << what << " " << i;
  }
}

TEST_F(IndexTest, EstimateMatchesDouble) {
  const Case cases[] = {
      {1, 1, 1, 64, {0}},
      {63, 4, 4, 128, Last(63, 17)},
      {1000, 16, 2, 128, Last(1000, 64)},
      {1000, 28, 4, 64, Last(1000, 100)},
      {4096, 6, 2, 128, Last(4096, 64), 64},
      {4096, 16, 2, 128, Spread(4096, 64, 16)},
      {4096, 3, 1, 128, Spread(4096, 256, 64)},
      {3001, 5, 5, 128, {5, 3000, 2, 130, 131, 1999}},
      {4096, 16, 2, 128, Spread(4096, 64, 1)},
      {4096, 6, 2, 128, Spread(4096, 100, 1), 64},
      // Documents from 0, 1, 130, 900 on.
      {1000,
       16,
       2,
       128,
       {0, 1, 60, 128, 130, 500, 899, 900, 999},
       128,
       {0, 1, 1, 1, 130, 130, 130, 900, 900}},
      {4096, 6, 2, 128, Last(4096, 64), 64, std::vector<int64_t>(64, 4000)},
      {4096, 3, 1, 64, Spread(4096, 256, 64), 128,
       StartsOf(Spread(4096, 256, 64), {0, 1000, 2047, 4033})},
  };
  for (const Case& c : cases) {
    if (SmallShapes() && c.tokens > 1000) continue;
    SCOPED_TRACE(::testing::Message() << c.tokens << " tokens, " << c.heads << " heads, "
                                      << c.query_positions.size() << " queries");
    const auto q = Normal(c.query_positions.size() * c.heads * c.head_dim, 2.0f);
    const auto k = Normal(c.tokens * c.kv_heads * c.head_dim, 1.0f);
    const Estimate expected = DoubleEstimate(c, q, k);
    const Estimate actual = RunEstimate(c, q, k, LayoutKind::kContiguous, 1);
    ExpectNear(actual.column_mass, expected.column_mass, 8, "column");
    ExpectNear(actual.diagonal_mass, expected.diagonal_mass, 260, "diagonal");
  }
}

TEST_F(IndexTest, EstimateIsTheSameOnAnyNumberOfRanks) {
  const int64_t tokens = SmallShapes() ? 1024 : 4096;
  for (const Case& c : {Case{tokens, 16, 2, 128, Last(tokens, 64)},
                        Case{tokens, 16, 2, 128, Spread(tokens, 128, 32)},
                        Case{tokens, 16, 2, 128, Spread(tokens, 64, 1), 64},
                        Case{tokens, 16, 2, 128, Spread(tokens, 128, 32), 128,
                             StartsOf(Spread(tokens, 128, 32), {0, 70, 300, tokens - 100})}}) {
    const auto q = Normal(c.query_positions.size() * c.heads * c.head_dim, 2.0f);
    const auto k = Normal(c.tokens * c.kv_heads * c.head_dim, 1.0f);
    const Estimate one = RunEstimate(c, q, k, LayoutKind::kContiguous, 1);
    for (const LayoutKind kind :
         {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      for (const int ranks : {2, 4, 8}) {
        if (SmallShapes() && ranks > 2) continue;
        const Estimate many = RunEstimate(c, q, k, kind, ranks);
        EXPECT_EQ(many.column_mass, one.column_mass) << static_cast<int>(kind) << " " << ranks;
        EXPECT_EQ(many.diagonal_mass, one.diagonal_mass) << static_cast<int>(kind) << " " << ranks;
      }
    }
  }
}

void IndexTest::CheckSelection(const Estimate& estimate, int heads, ShardLayout layout, int tile,
                               int max_columns, int sink, int local_blocks,
                               const std::vector<float>& mass,
                               const std::vector<int32_t>& max_count, bool by_tiles) {
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
    const int32_t chosen =
        reference::SelectDiagonals(block_mass, blocks, local_blocks, mass[h], max_count[h],
                                   want_bits.data(), by_tiles, &of_diagonals);
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

TEST_F(IndexTest, AdaptedBudgetsEqualTheReference) {
  for (const int heads : {1, 4, 16, 31}) {
    std::vector<IndexMass> masses(heads);
    std::vector<double> recall;
    std::vector<int32_t> counts;
    for (IndexMass& mass : masses) {
      mass = {.total = 1000,
              .columns = static_cast<int64_t>(random_() % 40) * 10,
              .diagonals = static_cast<int64_t>(random_() % 60) * 10};
      recall.push_back(mass.Recall());
    }
    for (int i = 0; i < 2 * heads; ++i) counts.push_back(static_cast<int32_t>(random_() % 5000));
    const DeviceBuffer<IndexMass> gpu_masses(masses);
    const DeviceBuffer<int32_t> gpu_counts(counts);
    ASSERT_EQ(AdaptBudgets(gpu_masses.data(), heads, gpu_counts.data(), nullptr), absl::OkStatus());
    reference::AdaptBudgets(recall, counts.data());
    EXPECT_EQ(gpu_counts.Read(), counts);
  }
}

// The arithmetic of moved choices is the CPU engine's, bit for bit.
TEST_F(IndexTest, MovesEqualTheReference) {
  reference::Engine engine(1);
  const TokenMajor<const float> none;
  const TokenMajor<const __nv_bfloat16> gpu_none;
  const auto on_both = [&](const BlockStep& host, const BlockStep& device) {
    reference::RunBlockStep(engine, none, none, host);
    EXPECT_EQ(RunBlockStep(gpu_none, gpu_none, device, nullptr, nullptr), absl::OkStatus());
  };
  for (const int heads : {1, 16, 300}) {
    std::vector<HeadChoice> before(heads), moved(heads);
    for (int head = 0; head < heads; ++head) {
      const auto mass = static_cast<int64_t>(random_() % (1u << 28));
      before[head] = {.columns = static_cast<int64_t>(random_() % 5000),
                      .column_mass = mass / 3,
                      .diagonal_tiles = static_cast<int64_t>(random_() % 100000),
                      .diagonal_mass = mass / 2,
                      .total = mass + 1};
      moved[head] = before[head];
      moved[head].column_mass -= before[head].column_mass / (1 + random_() % 20);
      moved[head].diagonal_mass -= before[head].diagonal_mass / (1 + random_() % 20);
    }
    const DeviceBuffer<HeadChoice> gpu_before(before), gpu_moved(moved);
    const std::vector<int64_t> works = {100, 250, 160, 90};
    const DeviceBuffer<int64_t> gpu_works(works);
    DeviceBuffer<float> gpu_factor(1), gpu_masses(2 * heads);
    DeviceBuffer<int32_t> gpu_counts(2 * heads);
    DeviceBuffer<int64_t> gpu_work(1);
    float factor = 0.0f;
    std::vector<float> masses(2 * heads);
    std::vector<int32_t> counts(2 * heads);
    int64_t work = 0;
    for (const Anchor anchor : {Anchor::kMin, Anchor::kMean, Anchor::kMax}) {
      FindMoveStep find = {.works = works.data(),
                           .ranks = 4,
                           .rank = 1,
                           .anchor = anchor,
                           .wanted = 1.1f,
                           .factor = &factor};
      FindMoveStep gpu_find = find;
      gpu_find.works = gpu_works.data();
      gpu_find.factor = gpu_factor.data();
      on_both(find, gpu_find);
      EXPECT_EQ(gpu_factor.Read()[0], factor);
      on_both(MoveBudgetsStep{.choices = before.data(),
                              .heads = heads,
                              .factor = &factor,
                              .masses = masses.data(),
                              .counts = counts.data()},
              MoveBudgetsStep{.choices = gpu_before.data(),
                              .heads = heads,
                              .factor = gpu_factor.data(),
                              .masses = gpu_masses.data(),
                              .counts = gpu_counts.data()});
      EXPECT_EQ(gpu_masses.Read(), masses);
      EXPECT_EQ(gpu_counts.Read(), counts);
      on_both(HoldMassStep{.before = before.data(),
                           .moved = moved.data(),
                           .heads = heads,
                           .tolerance = 0.1f,
                           .masses = masses.data(),
                           .counts = counts.data()},
              HoldMassStep{.before = gpu_before.data(),
                           .moved = gpu_moved.data(),
                           .heads = heads,
                           .tolerance = 0.1f,
                           .masses = gpu_masses.data(),
                           .counts = gpu_counts.data()});
      EXPECT_EQ(gpu_masses.Read(), masses);
      EXPECT_EQ(gpu_counts.Read(), counts);
    }
    on_both(
        SumChoicesStep{.choices = before.data(), .heads = heads, .blocks = 512, .work = &work},
        SumChoicesStep{
            .choices = gpu_before.data(), .heads = heads, .blocks = 512, .work = gpu_work.data()});
    EXPECT_EQ(gpu_work.Read()[0], work);
    // Rows keep their own block and others.
    const ShardLayout layout = {
        .kind = LayoutKind::kStriped, .ranks = 4, .rank = 2, .stripe = 128, .tokens = 16384};
    const int64_t query_tiles = layout.local_tokens() / 64;
    const int32_t words = BlockWords(16384 / 256);
    std::vector<uint32_t> chosen(heads * query_tiles * words);
    for (int64_t row = 0; row < heads * query_tiles; ++row) {
      const int64_t own = layout.Position(row % query_tiles * 64) / 256;
      chosen[row * words + own / 32] |= 1u << own % 32;
      for (int64_t block = 0; block < own; ++block) {
        if (random_() % 3 == 0) chosen[row * words + block / 32] |= 1u << block % 32;
      }
    }
    const DeviceBuffer<uint32_t> gpu_chosen(chosen);
    CountWorkStep count = {.chosen = chosen.data(),
                           .query_layout = layout,
                           .heads = heads,
                           .tile = 64,
                           .block_size = 256,
                           .work = &work};
    CountWorkStep gpu_count = count;
    gpu_count.chosen = gpu_chosen.data();
    gpu_count.work = gpu_work.data();
    on_both(count, gpu_count);
    EXPECT_EQ(gpu_work.Read()[0], work);
    EXPECT_GT(work, 0);
  }
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
