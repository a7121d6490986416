// What the tests of Hopper attention share: cases, their lists, problems dealt to ranks, and the
// CPU engine's answer (fp32, itself tested against an fp64 oracle) on inputs rounded to bf16.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/fused/device_buffer.h"
#include "kernels/reference/attention.h"
#include "kernels/reference/testing/masked_attention.h"
#include "kernels/sm90/attention.h"

namespace ringleader::kernels::sm90 {

using fused::DeviceBuffer;
using reference::testing::RandomTensor;
using reference::testing::Shard;
using reference::testing::Tensor;

// Relative error in the Frobenius norm. PyTorch's dense bf16 attention is at 3.5e-3 to 6.5e-3 on
// such inputs, so this is less than once its error; these kernels are at 1.7e-3.
constexpr double kTolerance = 3e-3;
constexpr double kLseTolerance = 1e-4;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline std::mt19937& Random() {
  static std::mt19937 random = [] {
    const unsigned seed = std::random_device{}();
    ::testing::Test::RecordProperty("seed", static_cast<int>(seed));
    return std::mt19937(seed);
  }();
  return random;
}

inline Tensor RandomBf16(int64_t tokens, int heads, int head_dim) {
  Tensor tensor = RandomTensor(tokens, heads, head_dim, Random());
  for (float& x : tensor.data) x = __bfloat162float(__float2bfloat16_rn(x));
  return tensor;
}

inline DeviceBuffer<__nv_bfloat16> ToBf16(const Tensor& tensor) {
  std::vector<__nv_bfloat16> values;
  values.reserve(tensor.data.size());
  for (const float x : tensor.data) values.push_back(__float2bfloat16_rn(x));
  return DeviceBuffer<__nv_bfloat16>(values);
}

template <typename T, typename Buffer>
TokenMajor<T> View(const Buffer& buffer, const Tensor& like) {
  return {
      buffer.data(), like.tokens, like.heads, like.head_dim, int64_t{like.heads} * like.head_dim,
      like.head_dim};
}

inline double RelativeNorm(const std::vector<float>& actual, const std::vector<float>& expected) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(actual[i])) return std::numeric_limits<double>::infinity();
    difference += std::pow(double{actual[i]} - expected[i], 2);
    norm += std::pow(double{expected[i]}, 2);
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

// Puts the rows of a shard where they belong in the whole sequence.
inline void Place(const std::vector<float>& shard, const ShardLayout& layout, Tensor& whole) {
  const int64_t row = int64_t{whole.heads} * whole.head_dim;
  for (int64_t i = 0; i < layout.local_tokens(); ++i) {
    std::copy_n(shard.begin() + i * row, row, whole.data.begin() + layout.Position(i) * row);
  }
}

struct Case {
  std::string name;
  int64_t tokens = 0;
  int heads = 4, kv_heads = 2, head_dim = 128, tile = 128;
  TilePattern pattern = TilePattern::kCausal;
  double density = 0.3;  // kToeplitz, kCsr
  int64_t window = 0;
  LayoutKind layout = LayoutKind::kContiguous;
  int ranks = 1, stripe = 0;
};

inline void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

// A case's lists in host memory, and their copies.
struct Lists {
  std::vector<uint64_t> diagonals;
  std::vector<int32_t> row_offsets, columns, column_offsets, rows;
  DeviceBuffer<uint64_t> gpu_diagonals;
  DeviceBuffer<int32_t> gpu_row_offsets, gpu_columns, gpu_column_offsets, gpu_rows;
  TileSelection host, gpu;

  explicit Lists(const Case& c) {
    host = {.pattern = c.pattern, .tile = c.tile, .window = c.window};
    const int64_t blocks = (c.tokens + c.tile - 1) / c.tile;
    std::bernoulli_distribution active(c.density);
    host.diagonal_words = static_cast<int32_t>((blocks + 63) / 64);
    for (int h = 0; h < c.heads; ++h) {
      for (int64_t delta = 0; delta < host.diagonal_words * 64; ++delta) {
        if (delta % 64 == 0) diagonals.push_back(0);
        if (delta == 0 || active(Random())) diagonals.back() |= uint64_t{1} << (delta % 64);
      }
    }
    // One line in eight is empty, one full.
    std::vector<bool> listed(c.heads * blocks * blocks);
    for (int64_t i = 0; i < c.heads * blocks * blocks; ++i) {
      const int64_t row = i / blocks % blocks, column = i % blocks;
      listed[i] = row % 8 != 5 && column % 8 != 3 && (row % 8 == 6 || active(Random()));
    }
    const auto fill = [&](bool by_row, std::vector<int32_t>& offsets, std::vector<int32_t>& list) {
      for (int h = 0; h < c.heads; ++h) {
        offsets.push_back(static_cast<int32_t>(list.size()));
        for (int64_t line = 0; line < blocks; ++line) {
          for (int64_t i = 0; i < blocks; ++i) {
            const int64_t row = by_row ? line : i, column = by_row ? i : line;
            if (listed[(h * blocks + row) * blocks + column]) list.push_back(i);
          }
          offsets.push_back(static_cast<int32_t>(list.size()));
        }
      }
    };
    fill(true, row_offsets, columns);
    fill(false, column_offsets, rows);
    gpu_diagonals = DeviceBuffer<uint64_t>(diagonals);
    gpu_row_offsets = DeviceBuffer<int32_t>(row_offsets);
    gpu_columns = DeviceBuffer<int32_t>(columns);
    gpu_column_offsets = DeviceBuffer<int32_t>(column_offsets);
    gpu_rows = DeviceBuffer<int32_t>(rows);
    gpu = host;
    host.diagonals = diagonals.data();
    host.row_offsets = row_offsets.data();
    host.columns = columns.data();
    host.column_offsets = column_offsets.data();
    host.rows = rows.data();
    gpu.diagonals = gpu_diagonals.data();
    gpu.row_offsets = gpu_row_offsets.data();
    gpu.columns = gpu_columns.data();
    gpu.column_offsets = gpu_column_offsets.data();
    gpu.rows = gpu_rows.data();
  }
};

struct Result {
  Tensor out, dq, dk, dv;
  std::vector<float> lse;
  Result(const Tensor& q, const Tensor& k)
      : out(q.tokens, q.heads, q.head_dim),
        dq(out),
        dk(k.tokens, k.heads, k.head_dim),
        dv(dk),
        lse(q.tokens * q.heads, kMinusInfinity) {}
};

class AttentionTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!fused::HaveGpu()) GTEST_SKIP() << "no GPU";
  }
};

// Per rank: q, gradients of q and what they need; per owner: k, v and their gradients.
struct QueryShard {
  ShardLayout layout;
  Tensor q;
  DeviceBuffer<__nv_bfloat16> gpu_q, gpu_d_out;
  DeviceBuffer<float> out, lse, delta, dq;
};
struct KeyShard {
  ShardLayout layout;
  Tensor k;
  DeviceBuffer<__nv_bfloat16> gpu_k, gpu_v;
  DeviceBuffer<float> dk, dv;
};

// q, k, v and d_out of a sequence, dealt to ranks.
class Problem {
 public:
  Tensor q, k, v, d_out;
  float scale;
  std::vector<QueryShard> queries;
  std::vector<KeyShard> keys;
  DeviceBuffer<char> workspace;

  explicit Problem(const Case& c)
      : q(RandomBf16(c.tokens, c.heads, c.head_dim)),
        k(RandomBf16(c.tokens, c.kv_heads, c.head_dim)),
        v(RandomBf16(c.tokens, c.kv_heads, c.head_dim)),
        d_out(RandomBf16(c.tokens, c.heads, c.head_dim)),
        scale(1.0f / std::sqrt(static_cast<float>(c.head_dim))),
        workspace(1 << 22) {
    for (int rank = 0; rank < c.ranks; ++rank) {
      const ShardLayout layout = {
          .kind = c.layout, .ranks = c.ranks, .rank = rank, .stripe = c.stripe, .tokens = c.tokens};
      Tensor q_shard = Shard(q, layout), k_shard = Shard(k, layout);
      const int64_t query_floats = q_shard.data.size(), key_floats = k_shard.data.size();
      const int64_t rows = layout.local_tokens() * c.heads;
      queries.push_back({layout, q_shard, ToBf16(q_shard), ToBf16(Shard(d_out, layout)),
                         DeviceBuffer<float>(std::vector<float>(query_floats, 0.0f)),
                         DeviceBuffer<float>(std::vector<float>(rows, kMinusInfinity)),
                         DeviceBuffer<float>(rows),
                         DeviceBuffer<float>(std::vector<float>(query_floats, 0.0f))});
      keys.push_back({layout, k_shard, ToBf16(k_shard), ToBf16(Shard(v, layout)),
                      DeviceBuffer<float>(std::vector<float>(key_floats, 0.0f)),
                      DeviceBuffer<float>(std::vector<float>(key_floats, 0.0f))});
    }
  }

  Workspace scratch() const { return {workspace.data(), workspace.size()}; }

  void Forward(const QueryShard& rank, const KeyShard& owner, const TileSelection& tiles) const {
    ASSERT_EQ(AttentionForward({.q = View<const __nv_bfloat16>(rank.gpu_q, rank.q),
                                .k = View<const __nv_bfloat16>(owner.gpu_k, owner.k),
                                .v = View<const __nv_bfloat16>(owner.gpu_v, owner.k),
                                .out = View<float>(rank.out, rank.q),
                                .lse = rank.lse.data(),
                                .query_layout = rank.layout,
                                .key_layout = owner.layout,
                                .tiles = tiles,
                                .scale = scale},
                               scratch(), nullptr),
              absl::OkStatus());
  }

  // delta from the out that the forward calls left.
  void ComputeDelta(const QueryShard& rank) const {
    const std::vector<float> out = rank.out.Read();
    const Tensor d_out_shard = Shard(d_out, rank.layout);
    std::vector<float> delta(rank.q.tokens * rank.q.heads, 0.0f);
    const int d = rank.q.head_dim;
    for (size_t i = 0; i < out.size(); ++i) {
      const int64_t token = i / d / rank.q.heads, head = i / d % rank.q.heads;
      delta[head * rank.q.tokens + token] += out[i] * d_out_shard.data[i];
    }
    fused::CheckCuda(
        cudaMemcpy(rank.delta.data(), delta.data(), rank.delta.Bytes(), cudaMemcpyHostToDevice),
        "copy delta");
  }

  AttentionBackwardArgs<__nv_bfloat16> BackwardArgs(const QueryShard& rank, const KeyShard& owner,
                                                    const TileSelection& tiles) const {
    return {.q = View<const __nv_bfloat16>(rank.gpu_q, rank.q),
            .k = View<const __nv_bfloat16>(owner.gpu_k, owner.k),
            .v = View<const __nv_bfloat16>(owner.gpu_v, owner.k),
            .d_out = View<const __nv_bfloat16>(rank.gpu_d_out, rank.q),
            .lse = rank.lse.data(),
            .delta = rank.delta.data(),
            .dq = View<float>(rank.dq, rank.q),
            .dk = View<float>(owner.dk, owner.k),
            .dv = View<float>(owner.dv, owner.k),
            .query_layout = rank.layout,
            .key_layout = owner.layout,
            .tiles = tiles,
            .scale = scale};
  }
  void Backward(const QueryShard& rank, const KeyShard& owner, const TileSelection& tiles) const {
    ASSERT_EQ(AttentionBackward(BackwardArgs(rank, owner, tiles), scratch(), nullptr),
              absl::OkStatus());
  }

  // The shards' results as those of the whole sequence.
  Result Collect() const {
    Result r(q, k);
    for (const QueryShard& rank : queries) {
      Place(rank.out.Read(), rank.layout, r.out);
      Place(rank.dq.Read(), rank.layout, r.dq);
      const std::vector<float> lse = rank.lse.Read();
      for (int h = 0; h < q.heads; ++h) {
        for (int64_t i = 0; i < rank.q.tokens; ++i) {
          r.lse[h * q.tokens + rank.layout.Position(i)] = lse[h * rank.q.tokens + i];
        }
      }
    }
    for (const KeyShard& owner : keys) {
      Place(owner.dk.Read(), owner.layout, r.dk);
      Place(owner.dv.Read(), owner.layout, r.dv);
    }
    return r;
  }
};

inline Result ReferenceRun(const Problem& p, const TileSelection& tiles) {
  static reference::Engine& engine = *new reference::Engine(4);
  Result r(p.q, p.k);
  const ShardLayout layout = {.tokens = p.q.tokens};
  EXPECT_EQ(reference::AttentionForward(engine, {.q = p.q.view(),
                                                 .k = p.k.view(),
                                                 .v = p.v.view(),
                                                 .out = r.out.view(),
                                                 .lse = r.lse.data(),
                                                 .query_layout = layout,
                                                 .key_layout = layout,
                                                 .tiles = tiles,
                                                 .scale = p.scale}),
            absl::OkStatus());
  std::vector<float> delta(r.lse.size());
  reference::AttentionDelta(engine, p.d_out.view(), std::as_const(r.out).view(), delta.data());
  EXPECT_EQ(reference::AttentionBackward(engine, {.q = p.q.view(),
                                                  .k = p.k.view(),
                                                  .v = p.v.view(),
                                                  .d_out = p.d_out.view(),
                                                  .lse = r.lse.data(),
                                                  .delta = delta.data(),
                                                  .dq = r.dq.view(),
                                                  .dk = r.dk.view(),
                                                  .dv = r.dv.view(),
                                                  .query_layout = layout,
                                                  .key_layout = layout,
                                                  .tiles = tiles,
                                                  .scale = p.scale}),
            absl::OkStatus());
  return r;
}

inline void ExpectClose(const Result& actual, const Result& expected) {
  EXPECT_LT(RelativeNorm(actual.out.data, expected.out.data), kTolerance) << "out";
  EXPECT_LT(RelativeNorm(actual.dq.data, expected.dq.data), kTolerance) << "dq";
  EXPECT_LT(RelativeNorm(actual.dk.data, expected.dk.data), kTolerance) << "dk";
  EXPECT_LT(RelativeNorm(actual.dv.data, expected.dv.data), kTolerance) << "dv";
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    if (expected.lse[i] == kMinusInfinity) {
      ASSERT_EQ(actual.lse[i], kMinusInfinity) << "lse of row " << i;
    } else {
      ASSERT_NEAR(actual.lse[i], expected.lse[i], kLseTolerance) << "lse of row " << i;
    }
  }
}

}  // namespace ringleader::kernels::sm90
