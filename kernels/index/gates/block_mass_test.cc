// Exact masses of blocks, what is kept by them and how density moves between heads, on the device,
// against doubles.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "kernels/index/gates/blocks.h"
#include "kernels/index/testing/block_shapes.h"
#include "kernels/reference/gates/mass_gate.h"
#include "kernels/reference/math/engine.h"
#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {
namespace {

using ::testing::HasSubstr;

using BlockMassTest = GpuTest;

// The mass that the tiles of `query`'s rows give to each block: [heads, query tiles, blocks], in
// double.
struct ExactMass {
  ExactMass(const Shape& s, const std::vector<Bf16>& q, const std::vector<Bf16>& k,
            const ShardLayout& query, const Sight& sight, float scale) {
    const int64_t n = query.local_tokens(), query_tiles = (n + s.tile - 1) / s.tile;
    const int64_t blocks = (s.tokens + s.tile - 1) / s.tile;
    const int64_t q_row = int64_t{s.heads} * s.head_dim, k_row = int64_t{s.kv_heads} * s.head_dim;
    const std::vector<float> qf = Floats(q), kf = Floats(k);
    mass.resize(s.heads * query_tiles * blocks);
    for (int h = 0; h < s.heads; ++h) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t position = query.Position(i);
        const int64_t begin = sight.Begin(position), end = sight.End(position);
        std::vector<double> p(end);
        double sum = 0;
        for (int64_t t = begin; t < end; ++t) {
          double dot = 0;
          for (int x = 0; x < s.head_dim; ++x) {
            dot += double{qf[position * q_row + int64_t{h} * s.head_dim + x]} *
                   kf[t * k_row + int64_t{h / (s.heads / s.kv_heads)} * s.head_dim + x];
          }
          sum += p[t] = std::exp(dot * scale);
        }
        if (std::isnan(sum)) continue;  // what is no number has no mass
        for (int64_t t = begin; t < end; ++t) {
          mass[(h * query_tiles + i / s.tile) * blocks + t / s.tile] += p[t] / sum;
        }
      }
    }
  }

  std::vector<double> mass;
};

// What 30 % of the blocks by `mass` [heads, query tiles, blocks] are, against the device's choice.
void CheckKept(const Shape& s, const std::vector<int32_t>& mass, const ShardLayout& query,
               const Sight& sight, const std::vector<uint32_t>& bits,
               const std::vector<int64_t>& kept, const std::vector<int64_t>& total) {
  const int64_t query_tiles = (query.local_tokens() + s.tile - 1) / s.tile;
  const int blocks = static_cast<int>((s.tokens + s.tile - 1) / s.tile);
  for (int h = 0; h < s.heads; ++h) {
    int64_t want_kept = 0, want_total = 0;
    for (int64_t a = 0; a < query_tiles; ++a) {
      const int32_t* row = &mass[(h * query_tiles + a) * blocks];
      const int64_t position = query.Position(a * s.tile),
                    last = query.Position(
                        std::min<int64_t>((a + 1) * s.tile, query.local_tokens()) - 1);
      const int own = static_cast<int>(position / s.tile);
      std::vector<int> order;
      for (int b = 0; b < blocks; ++b) {
        if (b != own && sight.Meets(position, last, b, s.tile)) order.push_back(b);
      }
      const auto seen = static_cast<int>(order.size());
      if (TiesGoLate(h)) std::reverse(order.begin(), order.end());
      std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return row[x] > row[y]; });
      order.resize(std::min<size_t>(seen, std::ceil(0.3f * static_cast<float>(seen))));
      order.push_back(own);
      for (int b = 0; b < blocks; ++b) {
        const bool want = std::find(order.begin(), order.end(), b) != order.end();
        const int64_t word = (h * query_tiles + a) * BlockWords(blocks) + b / 32;
        ASSERT_EQ(bits[word] >> (b % 32) & 1, want) << h << " " << a << " " << b;
        want_total += row[b];
        if (want) want_kept += row[b];
      }
    }
    EXPECT_EQ(kept[h], want_kept);
    EXPECT_EQ(total[h], want_total);
  }
}

TEST_F(BlockMassTest, BlockMassMatchesDoubleAndIsKeptByDensity) {
  for (const Shape& s :
       {Shape{LayoutKind::kContiguous, 1, 1000, 4, 2, 64, 64, 64, 0},
        Shape{LayoutKind::kStriped, 2, 2048, 8, 2, 128, 128, 128, 0},
        Shape{LayoutKind::kZigzag, 2, 1024, 3, 3, 128, 64, 64, 0},
        Shape{LayoutKind::kContiguous, 1, 1000, 4, 2, 64, 64, 64, 0, true},
        Shape{LayoutKind::kStriped, 2, 2048, 8, 2, 128, 128, 128, 0, true},
        Shape{LayoutKind::kContiguous, 1, 1000, 4, 2, 64, 64, 64, 0, false, Sight::Mask::kFull},
        Shape{LayoutKind::kZigzag, 2, 1024, 3, 3, 128, 64, 64, 0, true, Sight::Mask::kPrefix},
        Shape{LayoutKind::kStriped, 2, 2048, 8, 2, 128, 128, 128, 0, true, Sight::Mask::kBlocks},
        // Of many rows the largest is far beyond what exponentials hold of the last.
        Shape{LayoutKind::kContiguous, 1, 1500, 4, 2, 64, 64, 64, 0, true, Sight::Mask::kCausal,
              40},
        Shape{LayoutKind::kStriped, 2, 1024, 2, 2, 128, 128, 128, 0, false, Sight::Mask::kCausal,
              40}}) {
    SCOPED_TRACE(::testing::Message()
                 << s.tokens << " tokens, layout " << static_cast<int>(s.kind));
    const int64_t q_row = int64_t{s.heads} * s.head_dim, k_row = int64_t{s.kv_heads} * s.head_dim;
    auto q = Normal(s.tokens * q_row, s.logits);
    const auto k = Normal(s.tokens * k_row, 1.0f);
    for (int64_t i = 3; i < s.tokens; i += 7) {
      std::fill_n(q.begin() + i * q_row, q_row, Bf16(std::numeric_limits<float>::quiet_NaN()));
    }
    ShardLayout query = {
        .kind = s.kind, .ranks = s.ranks, .rank = s.ranks - 1, .stripe = 128, .tokens = s.tokens};
    const int64_t n = query.local_tokens(), query_tiles = (n + s.tile - 1) / s.tile;
    const int blocks = static_cast<int>((s.tokens + s.tile - 1) / s.tile);
    const float scale = 1 / std::sqrt(static_cast<float>(s.head_dim));
    const LocalSight sight(s, query);
    const ExactMass exact(s, q, k, query, sight.whole, scale);
    DeviceBuffer<Bf16> gpu_q(Shard(q, q_row, query)), all_keys(k);
    const TokenMajor<const Bf16> queries = {gpu_q.data(), n,     s.heads,
                                            s.head_dim,   q_row, s.head_dim};
    DeviceBuffer<int32_t> gpu_mass(s.heads * query_tiles * blocks);
    DeviceBuffer<char> workspace(static_cast<int64_t>(BlockMassWorkspaceBytes(s.tokens)));
    ASSERT_EQ(
        BlockMass(queries, {all_keys.data(), s.tokens, s.kv_heads, s.head_dim, k_row, s.head_dim},
                  {.query_layout = query,
                   .seen = sight.device.seen(),
                   .tile = s.tile,
                   .scale = scale,
                   .mass = gpu_mass.data()},
                  workspace.data(), nullptr),
        absl::OkStatus());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<int32_t> got = gpu_mass.Read();
    for (size_t i = 0; i < got.size(); ++i) {
      const double want = exact.mass[i] * (1 << 22);
      ASSERT_NEAR(got[i], want, 8 + 1e-4 * s.logits * want) << i;
    }

    DeviceBuffer<float> density(std::vector<float>(s.heads, 0.3f));
    DeviceBuffer<uint32_t> chosen(s.heads * query_tiles * BlockWords(blocks));
    DeviceBuffer<int64_t> kept(s.heads), total(s.heads);
    ASSERT_EQ(SelectBlocksByMass({.mass = gpu_mass.data(),
                                  .query_layout = query,
                                  .seen = sight.device.seen(),
                                  .heads = s.heads,
                                  .tile = s.tile,
                                  .density = density.data(),
                                  .chosen = chosen.data(),
                                  .kept = kept.data(),
                                  .total = total.data()},
                                 nullptr),
              absl::OkStatus());
    CheckKept(s, got, query, sight.whole, chosen.Read(), kept.Read(), total.Read());
  }
}

// Masses of what a rank has of q.
std::vector<int32_t> FindMasses(const Rows& q, const Rows& k, const Sight& sight, int tile,
                                float scale, const ShardLayout& layout) {
  const int64_t n = layout.local_tokens(), tiles = (n + tile - 1) / tile,
                blocks = (layout.tokens + tile - 1) / tile;
  const DeviceBuffer<Bf16> queries(q.Shard(layout)), keys(k.bf16);
  const reference::testing::RankSight host = sight.Of(layout);
  const DeviceSight of_rank(host);
  DeviceBuffer<int32_t> mass(q.heads * tiles * blocks);
  DeviceBuffer<char> workspace(static_cast<int64_t>(BlockMassWorkspaceBytes(layout.tokens)));
  EXPECT_EQ(BlockMass(q.ViewOf(queries, n), k.ViewOf(keys, layout.tokens),
                      {.query_layout = layout,
                       .seen = of_rank.seen(),
                       .tile = tile,
                       .scale = scale,
                       .mass = mass.data()},
                      workspace.data(), nullptr),
            absl::OkStatus());
  return mass.Read();
}

// A rank's masses are the sequence's, bit for bit: blocks have one to four runs of queries, there
// are more blocks than work at a time, and logits are near each other or far apart.
TEST_F(BlockMassTest, BlockMassIsTheSameOnAnyRank) {
  struct Case {
    int heads, kv_heads, tile, ranks;
    int64_t tokens;
    float scale = 0.1f;
    Sight::Mask mask = Sight::Mask::kCausal;
  };
  for (const Case& c :
       {Case{3, 3, 64, 6, 1920},                              // runs of a rank: 5
        Case{3, 3, 64, 6, 2688, 4.0f, Sight::Mask::kPrefix},  // 7
        Case{2, 1, 64, 9, 2880, 4.0f},                        // 5 of each of two heads
        Case{4, 1, 128, 6, 2304, 4.0f, Sight::Mask::kBlocks},
        Case{6, 2, 64, 6, 2304, 0.1f, Sight::Mask::kFull}, Case{24, 24, 64, 6, 2304, 4.0f}}) {
    if (SmallShapes() && c.heads > 3) continue;
    std::mt19937 random(7);
    const Rows q = RandomRows(c.tokens, c.heads, 128, random),
               k = RandomRows(c.tokens, c.kv_heads, 128, random);
    const Sight sight(c.mask, c.tokens, {0, 500, 1900});
    const int64_t blocks = c.tokens / c.tile;
    const std::vector<int32_t> whole =
        FindMasses(q, k, sight, c.tile, c.scale, {.tokens = c.tokens});
    for (const LayoutKind kind : {LayoutKind::kContiguous, LayoutKind::kStriped}) {
      for (int rank = 0; rank < c.ranks; ++rank) {
        const ShardLayout layout = {
            .kind = kind, .ranks = c.ranks, .rank = rank, .stripe = c.tile, .tokens = c.tokens};
        const std::vector<int32_t> found = FindMasses(q, k, sight, c.tile, c.scale, layout);
        const int64_t tiles = layout.local_tokens() / c.tile;
        for (int64_t i = 0; i < std::ssize(found); ++i) {
          const int64_t row = i / blocks, a = layout.Position(row % tiles * c.tile) / c.tile;
          ASSERT_EQ(found[i], whole[(row / tiles * blocks + a) * blocks + i % blocks])
              << c.heads << " heads, " << c.tokens << " tokens, rank " << rank << ", " << i;
        }
      }
    }
  }
}

// What is no number takes the masses of its 64 queries and of no others.
TEST_F(BlockMassTest, WhatIsNoNumberHasNoMass) {
  constexpr int64_t kTokens = 640, kBroken = 200;
  std::mt19937 random(7);
  Rows q = RandomRows(kTokens, 2, 64, random);
  const Rows k = RandomRows(kTokens, 1, 64, random);
  const Sight sight(Sight::Mask::kCausal, kTokens);
  for (const int tile : {64, 128}) {
    const int64_t blocks = kTokens / tile;
    const std::vector<int32_t> whole = FindMasses(q, k, sight, tile, 0.1f, {.tokens = kTokens});
    Rows broken = q;
    broken.bf16[kBroken * q.width() + 3] = __float2bfloat16_rn(NAN);  // of head 0
    const std::vector<int32_t> found =
        FindMasses(broken, k, sight, tile, 0.1f, {.tokens = kTokens});
    for (int64_t i = 0; i < std::ssize(found); ++i) {
      if (i / blocks != kBroken / tile) {
        ASSERT_EQ(found[i], whole[i]) << i;
      } else {
        ASSERT_LE(found[i], whole[i]) << i;  // the tile's other queries have theirs
        ASSERT_EQ(found[i] > 0, i % blocks <= kBroken / tile) << i;
      }
    }
  }
}

// Of the same masses the CPU engine keeps the same blocks, however they are moved.
TEST_F(BlockMassTest, MovedChoicesEqualTheReference) {
  reference::Engine engine(1);
  std::mt19937 random(7);
  for (const auto& [tokens, tile] : {std::pair{4096, 64}, {20000, 128}}) {
    constexpr int kHeads = 3;
    const ShardLayout layout = {.tokens = tokens};
    const int64_t tiles = (tokens + tile - 1) / tile, rows = kHeads * tiles;
    const int32_t words = BlockWords(static_cast<int32_t>(tiles));
    std::vector<int32_t> mass(rows * tiles, 0);
    for (int64_t row = 0; row < rows; ++row) {
      double left = std::ldexp(tile, kMassBits);
      for (int64_t block = 0; block <= row % tiles; ++block) {
        const double part = left * std::generate_canonical<double, 32>(random);
        mass[row * tiles + (block * 7 + row) % (row % tiles + 1)] += static_cast<int32_t>(part);
        left -= part;
      }
    }
    const DeviceBuffer<int32_t> gpu_mass(mass);
    for (const float factor : {0.5f, 0.8f, 1.4f}) {
      for (const float tolerance : {0.001f, 0.05f, 0.5f}) {
        const std::vector<float> density = {0.1f, 0.3f, 0.6f};
        std::vector<uint32_t> chosen(rows * words);
        std::vector<int64_t> kept(kHeads), total(kHeads);
        MassGateStep step = {.mass = mass.data(),
                             .query_layout = layout,
                             .heads = kHeads,
                             .tile = tile,
                             .density = density.data(),
                             .move = {.factor = &factor, .tolerance = tolerance},
                             .chosen = chosen.data(),
                             .kept = kept.data(),
                             .total = total.data()};
        reference::SelectBlocksByMass(engine, step);
        const DeviceBuffer<float> gpu_density(density), gpu_factor(std::vector<float>{factor});
        DeviceBuffer<uint32_t> gpu_chosen(chosen.size());
        DeviceBuffer<int64_t> gpu_kept(kHeads), gpu_total(kHeads);
        step.mass = gpu_mass.data();
        step.density = gpu_density.data();
        step.move.factor = gpu_factor.data();
        step.chosen = gpu_chosen.data();
        step.kept = gpu_kept.data();
        step.total = gpu_total.data();
        ASSERT_TRUE(SelectBlocksByMass(step, nullptr).ok());
        EXPECT_EQ(gpu_chosen.Read(), chosen) << tokens << ", " << factor << ", " << tolerance;
        EXPECT_EQ(gpu_kept.Read(), kept);
        EXPECT_EQ(gpu_total.Read(), total);
      }
    }
  }
}

TEST_F(BlockMassTest, AdaptedDensityFavoursHeadsOfLowRecall) {
  const std::vector<int64_t> kept = {95, 30, 90, 50, 85, 85, 10}, total(7, 100);
  DeviceBuffer<int64_t> gpu_kept(kept), gpu_total(total);
  DeviceBuffer<float> density(7);
  // Four exceed 0.8, of which half of seven, three, give to three.
  ASSERT_EQ(AdaptDensity({.kept = gpu_kept.data(),
                          .total = gpu_total.data(),
                          .heads = 7,
                          .density = 0.2f,
                          .threshold = 0.8f,
                          .head_density = density.data()},
                         nullptr),
            absl::OkStatus());
  EXPECT_THAT(density.Read(), ::testing::Pointwise(::testing::FloatEq(),
                                                   {0.1f, 0.3f, 0.1f, 0.3f, 0.1f, 0.2f, 0.3f}));
}

TEST(BlockMassArgumentsTest, ErrorsNameTheArgumentAndWhatIsAllowed) {
  EXPECT_THAT(BlockMass({nullptr, 64, 1, 80, 80, 80}, {nullptr, 64, 1, 80, 80, 80},
                        {.query_layout = {.tokens = 64}, .scale = 1.0f}, nullptr, nullptr)
                  .message(),
              HasSubstr("head_dim is 80"));
  EXPECT_THAT(AdaptDensity({.heads = 2000, .density = 0.1f}, nullptr).message(),
              HasSubstr("heads is 2000"));
}

}  // namespace
}  // namespace ringleader::kernels::index
