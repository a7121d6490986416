// Estimates on the device, which tests of the index compare or select from.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "kernels/index/estimate.h"
#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"

namespace ringleader::kernels::index {

using Bf16 = __nv_bfloat16;

struct Case {
  int64_t tokens;
  int heads, kv_heads, head_dim;
  std::vector<int64_t> query_positions;
  int tile = 128;
  std::vector<int64_t> query_starts = {};  // of the queries' documents; empty: one document
};

// The last `count` queries of the sequence.
inline std::vector<int64_t> Last(int64_t tokens, int count) {
  std::vector<int64_t> positions(count);
  std::iota(positions.begin(), positions.end(), tokens - count);
  return positions;
}

// Runs of `run` queries spread over the sequence.
inline std::vector<int64_t> Spread(int64_t tokens, int count, int run) {
  std::vector<int64_t> positions;
  for (int r = 0; r < count / run; ++r) {
    const int64_t start = (r + 1) * tokens / (count / run) - run;
    for (int i = 0; i < run; ++i) positions.push_back(start + i);
  }
  return positions;
}

// Where the documents that begin at `firsts` start for each of the positions.
inline std::vector<int64_t> StartsOf(const std::vector<int64_t>& positions,
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

}  // namespace ringleader::kernels::index
