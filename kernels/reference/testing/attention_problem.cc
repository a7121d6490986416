#include "kernels/reference/testing/attention_problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "kernels/reference/attention/attention.h"
#include "kernels/reference/testing/packed_documents.h"

namespace ringleader::kernels::reference::testing {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// What one rank has of an AttentionProblem, and its gradients.
struct Rank {
  ShardLayout layout;
  Tensor q, k, v, d_out, out, dq, dk, dv;
  std::vector<float> lse, delta;
  std::vector<int32_t> document_starts;
  std::vector<KeyIntervals> intervals;
  TileSelection tiles;

  Rank(const AttentionProblem& whole, const TileSelection& of_whole, const ShardLayout& layout)
      : layout(layout),
        q(Shard(whole.q, layout)),
        k(Shard(whole.k, layout)),
        v(Shard(whole.v, layout)),
        d_out(Shard(whole.d_out, layout)),
        out(q.tokens, q.heads, q.head_dim),
        dq(out),
        dk(k.tokens, k.heads, k.head_dim),
        dv(dk),
        lse(q.tokens * q.heads, kNegativeInfinity),
        delta(q.tokens * q.heads),
        tiles(of_whole) {
    if (of_whole.document_starts != nullptr) {
      document_starts =
          ShardStarts({of_whole.document_starts, of_whole.document_starts + layout.tokens}, layout);
      tiles.document_starts = document_starts.data();
    }
    if (of_whole.intervals != nullptr) {
      for (int64_t i = 0; i < q.tokens; ++i) {
        intervals.push_back(of_whole.intervals[layout.Position(i)]);
      }
      tiles.intervals = intervals.data();
    }
  }
};

// Rows of a tensor put back to where a layout took them from.
void Unshard(const Tensor& shard, const ShardLayout& layout, Tensor& whole) {
  const int64_t row = int64_t{shard.heads} * shard.head_dim;
  for (int64_t i = 0; i < shard.tokens; ++i) {
    std::copy_n(shard.data.begin() + i * row, row, whole.data.begin() + layout.Position(i) * row);
  }
}

// Gathered keys and values of selected columns.
struct ColumnRows {
  std::vector<float> keys, values;

  ColumnRows(const std::vector<Rank>& ranks, const ColumnSelection& columns) {
    const Tensor& q = ranks.front().q;
    keys.resize(int64_t{q.heads} * columns.max_columns * q.head_dim);
    values.resize(keys.size());
    for (const Rank& owner : ranks) {
      GatherColumns(owner.k.view(), owner.v.view(), owner.layout, columns, q.heads, keys.data(),
                    values.data());
    }
  }
};

void Forward(Engine& engine, std::vector<Rank>& ranks, const ColumnSelection* columns,
             float scale) {
  for (Rank& rank : ranks) {
    for (const Rank& owner : ranks) {
      const absl::Status status = AttentionForward(engine, {.q = std::as_const(rank.q).view(),
                                                            .k = owner.k.view(),
                                                            .v = owner.v.view(),
                                                            .out = rank.out.view(),
                                                            .lse = rank.lse.data(),
                                                            .query_layout = rank.layout,
                                                            .key_layout = owner.layout,
                                                            .tiles = rank.tiles,
                                                            .scale = scale});
      EXPECT_TRUE(status.ok()) << status;
    }
    if (columns != nullptr) {
      const ColumnRows rows(ranks, *columns);
      const absl::Status status = ColumnForward(engine, {.q = std::as_const(rank.q).view(),
                                                         .keys = rows.keys.data(),
                                                         .values = rows.values.data(),
                                                         .columns = *columns,
                                                         .tiles = rank.tiles,
                                                         .query_layout = rank.layout,
                                                         .out = rank.out.view(),
                                                         .lse = rank.lse.data(),
                                                         .scale = scale});
      EXPECT_TRUE(status.ok()) << status;
    }
    AttentionDelta(engine, std::as_const(rank.d_out).view(), std::as_const(rank.out).view(),
                   rank.delta.data());
  }
}

void ColumnsBackward(Engine& engine, std::vector<Rank>& ranks, const ColumnSelection& columns,
                     float scale) {
  const ColumnRows rows(ranks, columns);
  for (Rank& rank : ranks) {
    std::vector<float> d_keys(rows.keys.size()), d_values(rows.keys.size());
    const absl::Status status = ColumnBackward(engine, {.q = std::as_const(rank.q).view(),
                                                        .d_out = std::as_const(rank.d_out).view(),
                                                        .keys = rows.keys.data(),
                                                        .values = rows.values.data(),
                                                        .columns = columns,
                                                        .tiles = rank.tiles,
                                                        .query_layout = rank.layout,
                                                        .lse = rank.lse.data(),
                                                        .delta = rank.delta.data(),
                                                        .dq = rank.dq.view(),
                                                        .d_keys = d_keys.data(),
                                                        .d_values = d_values.data(),
                                                        .scale = scale});
    EXPECT_TRUE(status.ok()) << status;
    for (Rank& owner : ranks) {
      ScatterColumns(d_keys.data(), d_values.data(), owner.layout, columns, rank.q.heads,
                     owner.dk.view(), owner.dv.view());
    }
  }
}

void Backward(Engine& engine, std::vector<Rank>& ranks, float scale) {
  for (Rank& rank : ranks) {
    for (Rank& owner : ranks) {
      const absl::Status status =
          AttentionBackward(engine, {.q = std::as_const(rank.q).view(),
                                     .k = std::as_const(owner.k).view(),
                                     .v = std::as_const(owner.v).view(),
                                     .d_out = std::as_const(rank.d_out).view(),
                                     .lse = rank.lse.data(),
                                     .delta = rank.delta.data(),
                                     .dq = rank.dq.view(),
                                     .dk = owner.dk.view(),
                                     .dv = owner.dv.view(),
                                     .query_layout = rank.layout,
                                     .key_layout = owner.layout,
                                     .tiles = rank.tiles,
                                     .scale = scale});
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

}  // namespace

AttentionProblem::AttentionProblem(int64_t tokens, int heads, int kv_heads, int head_dim, int seed)
    : q(0, 0, 0),
      k(0, 0, 0),
      v(0, 0, 0),
      d_out(0, 0, 0),
      scale(1.0f / std::sqrt(static_cast<float>(head_dim))) {
  std::mt19937 random(seed);
  q = RandomTensor(tokens, heads, head_dim, random);
  k = RandomTensor(tokens, kv_heads, head_dim, random);
  v = RandomTensor(tokens, kv_heads, head_dim, random);
  d_out = RandomTensor(tokens, heads, head_dim, random);
}

AttentionResult AttentionProblem::Run(Engine& engine, const TileSelection& tiles,
                                      const ColumnSelection* columns) const {
  return RunRing(engine, tiles, columns, layout());
}

AttentionResult AttentionProblem::RunRing(Engine& engine, const TileSelection& tiles,
                                          const ColumnSelection* columns,
                                          const ShardLayout& layout) const {
  std::vector<Rank> ranks;
  ranks.reserve(layout.ranks);
  for (int rank = 0; rank < layout.ranks; ++rank) {
    ShardLayout of_rank = layout;
    of_rank.rank = rank;
    ranks.emplace_back(*this, tiles, of_rank);
  }
  Forward(engine, ranks, columns, scale);
  if (columns != nullptr) ColumnsBackward(engine, ranks, *columns, scale);
  Backward(engine, ranks, scale);

  const int64_t n = q.tokens;
  AttentionResult r{Tensor(n, q.heads, q.head_dim), Tensor(n, q.heads, q.head_dim),
                    Tensor(n, k.heads, q.head_dim), Tensor(n, k.heads, q.head_dim),
                    std::vector<float>(n * q.heads)};
  for (const Rank& rank : ranks) {
    Unshard(rank.out, rank.layout, r.out);
    Unshard(rank.dq, rank.layout, r.dq);
    Unshard(rank.dk, rank.layout, r.dk);
    Unshard(rank.dv, rank.layout, r.dv);
    for (int64_t i = 0; i < rank.q.tokens; ++i) {
      for (int head = 0; head < q.heads; ++head) {
        r.lse[head * n + rank.layout.Position(i)] = rank.lse[head * rank.q.tokens + i];
      }
    }
  }
  return r;
}

MaskedAttention AttentionProblem::Expected(const Visible& visible) const {
  return ComputeMaskedAttention(q, k, v, d_out, scale, visible);
}

void ExpectNear(const AttentionResult& actual, const MaskedAttention& expected) {
  constexpr double kTolerance = 1e-5;
  EXPECT_LT(RelativeError(actual.out.data, expected.out), kTolerance);
  EXPECT_LT(RelativeError(actual.lse, expected.lse), kTolerance);
  EXPECT_LT(RelativeError(actual.dq.data, expected.dq), kTolerance);
  EXPECT_LT(RelativeError(actual.dk.data, expected.dk), kTolerance);
  EXPECT_LT(RelativeError(actual.dv.data, expected.dv), kTolerance);
}

void ExpectNear(const AttentionResult& actual, const AttentionResult& expected) {
  const auto doubles = [](const std::vector<float>& x) {
    return std::vector<double>(x.begin(), x.end());
  };
  ExpectNear(actual, MaskedAttention{.out = doubles(expected.out.data),
                                     .lse = doubles(expected.lse),
                                     .dq = doubles(expected.dq.data),
                                     .dk = doubles(expected.dk.data),
                                     .dv = doubles(expected.dv.data)});
}

}  // namespace ringleader::kernels::reference::testing
