// Estimates on the device against double precision, and on one rank against several.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/index/testing/index_fixture.h"

namespace ringleader::kernels::index {
namespace {

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
      // One and two runs of queries, which warpgroups multiply in turns, with many tiles a block.
      {131072, 2, 2, 64, Last(131072, 64)},
      {131072, 4, 2, 64, Last(131072, 64)},
      {131072, 4, 2, 64, Spread(131072, 64, 1)},
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

}  // namespace
}  // namespace ringleader::kernels::index
