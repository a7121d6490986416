// What the tests of Hopper attention share: problems dealt to ranks, and the CPU engine's answer
// (fp32, itself tested against an fp64 oracle) on inputs rounded to bf16.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "kernels/reference/attention/attention.h"
#include "kernels/reference/testing/masked_attention.h"
#include "kernels/sm90/attention.h"
#include "kernels/sm90/testing/attention_lists.h"
#include "kernels/testing/device_buffer.h"

namespace ringleader::kernels::sm90 {

using reference::testing::RandomTensor;
using reference::testing::Shard;
using reference::testing::Tensor;

// Relative error in the Frobenius norm. PyTorch's dense bf16 attention is at 3.5e-3 to 6.5e-3 on
// such inputs, so this is less than once its error; these kernels are at 1.7e-3.
constexpr double kTolerance = 3e-3;
constexpr double kLseTolerance = 1e-4;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

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

// NaN counts, too: poisoned elements are NaN.
inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Puts the rows of a shard where they belong in the whole sequence.
inline void Place(const std::vector<float>& shard, const ShardLayout& layout, Tensor& whole) {
  const int64_t row = int64_t{whole.heads} * whole.head_dim;
  for (int64_t i = 0; i < layout.local_tokens(); ++i) {
    std::copy_n(shard.begin() + i * row, row, whole.data.begin() + layout.Position(i) * row);
  }
}

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
    if (!HaveGpu()) GTEST_SKIP() << "no GPU";
  }
};

// Per rank: q, gradients of q and what they need; per owner: k, v and their gradients. out starts
// as NaN: it is not read before lse says that it was written.
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
        workspace(1 << 25) {
    for (int rank = 0; rank < c.ranks; ++rank) {
      const ShardLayout layout = c.LayoutOf(rank);
      Tensor q_shard = Shard(q, layout), k_shard = Shard(k, layout);
      const int64_t query_floats = q_shard.data.size(), key_floats = k_shard.data.size();
      const int64_t rows = layout.local_tokens() * c.heads;
      queries.push_back({layout, q_shard, ToBf16(q_shard), ToBf16(Shard(d_out, layout)),
                         DeviceBuffer<float>(query_floats),
                         DeviceBuffer<float>(std::vector<float>(rows, kMinusInfinity)),
                         DeviceBuffer<float>(rows),
                         DeviceBuffer<float>(std::vector<float>(query_floats, 0.0f))});
      keys.push_back({layout, k_shard, ToBf16(k_shard), ToBf16(Shard(v, layout)),
                      DeviceBuffer<float>(std::vector<float>(key_floats, 0.0f)),
                      DeviceBuffer<float>(std::vector<float>(key_floats, 0.0f))});
    }
  }

  Workspace scratch() const { return {workspace.data(), workspace.size()}; }

  AttentionForwardArgs<__nv_bfloat16> ForwardArgs(const QueryShard& rank, const KeyShard& owner,
                                                  const TileSelection& tiles) const {
    return {.q = View<const __nv_bfloat16>(rank.gpu_q, rank.q),
            .k = View<const __nv_bfloat16>(owner.gpu_k, owner.k),
            .v = View<const __nv_bfloat16>(owner.gpu_v, owner.k),
            .out = View<float>(rank.out, rank.q),
            .lse = rank.lse.data(),
            .query_layout = rank.layout,
            .key_layout = owner.layout,
            .tiles = tiles,
            .scale = scale};
  }
  void Forward(const QueryShard& rank, const KeyShard& owner, const TileSelection& tiles) const {
    ASSERT_EQ(AttentionForward(ForwardArgs(rank, owner, tiles), scratch(), nullptr),
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
    CheckCuda(
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
  void Backward(const QueryShard& rank, const KeyShard& owner, const TileSelection& tiles,
                bool deterministic = false) const {
    AttentionBackwardArgs<__nv_bfloat16> args = BackwardArgs(rank, owner, tiles);
    args.deterministic = deterministic;
    ASSERT_EQ(AttentionBackward(args, scratch(), nullptr), absl::OkStatus());
  }

  // All ring steps of all ranks.
  void ForwardRing(const Lists& lists) const {
    for (const QueryShard& rank : queries) {
      for (const KeyShard& owner : keys) {
        ASSERT_NO_FATAL_FAILURE(
            Forward(rank, owner, lists.Of(rank.layout.rank, owner.layout.rank)));
      }
      ComputeDelta(rank);
    }
  }
  // The same, from gradients of zero.
  void BackwardRing(const Lists& lists, bool deterministic) const {
    ZeroGradients();
    for (const QueryShard& rank : queries) {
      for (const KeyShard& owner : keys) {
        ASSERT_NO_FATAL_FAILURE(
            Backward(rank, owner, lists.Of(rank.layout.rank, owner.layout.rank), deterministic));
      }
    }
  }
  void ZeroGradients() const {
    const auto zero = [](const DeviceBuffer<float>& buffer) {
      CheckCuda(cudaMemset(buffer.data(), 0, buffer.Bytes()), "cudaMemset");
    };
    for (const QueryShard& rank : queries) zero(rank.dq);
    for (const KeyShard& owner : keys) zero(owner.dk), zero(owner.dv);
  }

  // The shards' results as those of the whole sequence.
  // dq of all ranks, then dk and dv of all owners, as they lie in memory.
  std::vector<std::vector<float>> Gradients() const {
    std::vector<std::vector<float>> gradients;
    for (const QueryShard& rank : queries) gradients.push_back(rank.dq.Read());
    for (const KeyShard& owner : keys) {
      gradients.push_back(owner.dk.Read());
      gradients.push_back(owner.dv.Read());
    }
    return gradients;
  }

  Result Collect() const {
    Result r(q, k);
    for (const QueryShard& rank : queries) {
      std::vector<float> out = rank.out.Read();
      const std::vector<float> lse = rank.lse.Read();
      for (int h = 0; h < q.heads; ++h) {
        for (int64_t i = 0; i < rank.q.tokens; ++i) {
          const float row_lse = lse[h * rank.q.tokens + i];
          r.lse[h * q.tokens + rank.layout.Position(i)] = row_lse;
          if (row_lse != kMinusInfinity) continue;
          // Nobody wrote the row; its output counts as zero.
          for (int k = 0; k < q.head_dim; ++k) {
            float& x = out[(i * q.heads + h) * q.head_dim + k];
            EXPECT_TRUE(std::isnan(x)) << "head " << h << ", row " << i;
            x = 0;
          }
        }
      }
      Place(out, rank.layout, r.out);
      Place(rank.dq.Read(), rank.layout, r.dq);
    }
    for (const KeyShard& owner : keys) {
      Place(owner.dk.Read(), owner.layout, r.dk);
      Place(owner.dv.Read(), owner.layout, r.dv);
    }
    return r;
  }
};

inline Result ReferenceRun(const Problem& p, const TileSelection& tiles) {
  static reference::Engine& engine =
      *new reference::Engine(static_cast<int>(std::max(4u, std::thread::hardware_concurrency())));
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

// Run 0 leaves its `gradients` in `first`; those of later runs must be the same bits.
inline void AssertSameBits(std::vector<std::vector<float>> gradients, int run,
                           std::vector<std::vector<float>>& first) {
  if (run == 0) {
    first = std::move(gradients);
    return;
  }
  for (size_t i = 0; i < first.size(); ++i) {
    ASSERT_TRUE(SameBits(gradients[i], first[i])) << "run " << run << ", gradient " << i;
  }
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
