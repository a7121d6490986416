// XAttention's choice on the device against the fp64 oracle, and on several ranks against one.
#include "kernels/index/gates/antidiagonal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/index/gates/block_steps.h"
#include "kernels/index/testing/gate_rows.h"
#include "kernels/reference/gates/antidiagonal_gate.h"
#include "kernels/reference/testing/antidiagonal_oracle.h"
#include "kernels/reference/testing/packed_documents.h"
#include "kernels/reference/testing/sight.h"
#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"

namespace ringleader::kernels::index {
namespace {

using Bf16 = __nv_bfloat16;
using reference::testing::AntidiagonalLogits;
using reference::testing::AntidiagonalOracle;
using reference::testing::Sight;
using ::testing::HasSubstr;

// fp32 sums of exact products, and masses in units of 2^-22 a block.
constexpr double kTolerance = 2e-4;

class AntidiagonalTest : public GpuTest {
 protected:
  Rows Random(int64_t tokens, int heads, int head_dim) {
    return RandomRows(tokens, heads, head_dim, random_);
  }

  // What the rank of `layout` chooses; the step's head_halves are in the host's memory. Several
  // ranks are given the keys of all as Gather leaves them.
  std::vector<uint32_t> Choose(const Rows& q, const Rows& k, AntidiagonalGateStep step,
                               const ShardLayout& layout, const Sight& sight) {
    const int64_t n = layout.local_tokens();
    const DeviceBuffer<Bf16> queries(q.Shard(layout)), keys(k.Shard(layout));
    DeviceBuffer<Bf16> gathered(layout.tokens * k.width()), ordered(layout.tokens * k.width());
    const TokenMajor<const Bf16> q_view = q.ViewOf(queries, n);
    const auto run = [&](const TokenMajor<const Bf16>& k_view, const BlockStep& block_step) {
      const DeviceBuffer<char> workspace(
          static_cast<int64_t>(BlockStepWorkspaceBytes(q_view, k_view, block_step)) + 16);
      EXPECT_EQ(RunBlockStep(q_view, k_view, block_step, workspace.data(), nullptr),
                absl::OkStatus());
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    };
    if (layout.ranks > 1) {
      ShardLayout owner = layout;
      for (owner.rank = 0; owner.rank < owner.ranks; ++owner.rank) {
        const DeviceBuffer<Bf16> of_owner(k.Shard(owner));
        run(k.ViewOf(of_owner, n),
            PackKeysStep{.packed = gathered.data() + owner.rank * n * k.width()});
      }
      run(k.ViewOf(keys, n),
          OrderTilesStep{.gathered = reinterpret_cast<const float*>(gathered.data()),
                         .layout = layout,
                         .tile = step.tile,
                         .row = step.tile * k.width() / 2,
                         .ordered = reinterpret_cast<float*>(ordered.data())});
      step.keys = ordered.data();
    }
    const DeviceSight local_sight(sight.Of(layout));
    const int64_t tiles = (n + step.tile - 1) / step.tile,
                  blocks = (layout.tokens + step.tile - 1) / step.tile;
    DeviceBuffer<uint32_t> chosen(q.heads * tiles * BlockWords(static_cast<int32_t>(blocks)));
    const DeviceBuffer<int32_t> head_halves =
        step.head_halves == nullptr
            ? DeviceBuffer<int32_t>()
            : DeviceBuffer<int32_t>(std::span(step.head_halves, static_cast<size_t>(q.heads)));
    step.head_halves = head_halves.data();
    step.query_layout = layout;
    step.seen = local_sight.seen();
    step.chosen = chosen.data();
    run(k.ViewOf(keys, n), step);
    return chosen.Read();
  }

  static Sight Causal(int64_t tokens) { return Sight(Sight::Mask::kCausal, tokens); }

  void ExpectRanksChoose(const Rows& q, const Rows& k, const AntidiagonalGateStep& step,
                         const Sight& sight, const std::vector<uint32_t>& one) {
    const int64_t tokens = q.tokens, tiles = tokens / step.tile;
    const int64_t words = BlockWords(static_cast<int32_t>(tiles));
    for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      for (int rank = 0; rank < 4; ++rank) {
        const ShardLayout layout = {
            .kind = kind, .ranks = 4, .rank = rank, .stripe = 2 * step.tile, .tokens = tokens};
        const std::vector<uint32_t> bits = Choose(q, k, step, layout, sight);
        for (int64_t i = 0; i < std::ssize(bits); ++i) {
          const int64_t row = i / words, head = row / (tiles / 4);
          const int64_t tile = layout.Position(row % (tiles / 4) * step.tile) / step.tile;
          ASSERT_EQ(bits[i], one[(head * tiles + tile) * words + i % words]) << row;
        }
      }
    }
  }

  std::mt19937 random_{11};
};

TEST_F(AntidiagonalTest, IsTheOraclesAndOnRanksThatOfOne) {
  for (const auto& [tokens, head_dim, tile, stride] : {std::tuple{1000, 64, 64, 16},
                                                       {4096, 128, 128, 16},
                                                       {4096, 128, 128, 8},
                                                       {8192, 128, 128, 64},
                                                       {4096, 64, 64, 8},
                                                       {4096, 64, 128, 32},
                                                       {40, 64, 64, 64}}) {
    if (SmallShapes() && tokens > 1024) continue;
    const Rows q = Random(tokens, 4, head_dim), k = Random(tokens, 2, head_dim);
    const AntidiagonalLogits logits(q.View(), k.View(), stride);
    const std::vector<int64_t> documents =
        reference::testing::RandomDocuments(tokens, tile, random_);
    for (int trial = 0; trial < 8; ++trial) {
      const bool packed = trial % 2 == 1;
      const Sight sight(Sight::kMasks[trial / 2], tokens,
                        packed ? documents : std::vector<int64_t>());
      for (const auto& [threshold, density] :
           {std::pair{0.9f, 0.0f}, {0.3f, 0.0f}, {1.0f, 0.0f}, {0.5f, 0.3f}, {1.0f, 0.1f}}) {
        SCOPED_TRACE(::testing::Message()
                     << tokens << " tokens, tile " << tile << ", stride " << stride
                     << ", threshold " << threshold << ", density " << density
                     << (packed ? ", documents, " : ", ") << Sight::kNames[trial / 2]);
        const AntidiagonalGateStep step = {.tile = tile,
                                           .stride = stride,
                                           .scale = 1.0f,  // logits far apart
                                           .threshold = threshold,
                                           .density = density};
        const AntidiagonalOracle oracle(logits, step, sight);
        const ShardLayout whole = {.tokens = tokens};
        const std::vector<uint32_t> one = Choose(q, k, step, whole, sight);
        EXPECT_EQ(oracle.Complaint(one.data(), whole, kTolerance), "");
        if (tokens % (8 * tile) != 0) continue;
        ExpectRanksChoose(q, k, step, sight, one);
      }
    }
  }
}

// Heads have budgets of their own, of what the share leaves besides the blocks that are always
// kept.
TEST_F(AntidiagonalTest, HeadsKeepTheirHalvesOfTheShare) {
  const std::vector<int32_t> halves = {3, 1, 2, 1};
  for (const auto& [tokens, head_dim, tile] :
       {std::tuple{1024, 64, 64}, {1000, 64, 64}, {8192, 128, 128}}) {
    if (SmallShapes() && tokens > 1024) continue;
    const Rows q = Random(tokens, 4, head_dim), k = Random(tokens, 2, head_dim);
    const AntidiagonalLogits logits(q.View(), k.View(), 16);
    const std::vector<int64_t> documents =
        reference::testing::RandomDocuments(tokens, tile, random_);
    for (const auto mask : Sight::kMasks) {
      const Sight sight(mask, tokens, documents);
      for (const auto& [threshold, density] :
           {std::pair{1.0f, 0.1f}, {1.0f, 2.0f / 3.0f}, {0.5f, 0.3f}, {1.0f, 0.0f}}) {
        SCOPED_TRACE(::testing::Message()
                     << tokens << " tokens, threshold " << threshold << ", density " << density
                     << ", mask " << static_cast<int>(mask));
        const AntidiagonalGateStep step = {.tile = tile,
                                           .stride = 16,
                                           .scale = 1.0f,
                                           .threshold = threshold,
                                           .density = density,
                                           .head_halves = halves.data()};
        const AntidiagonalOracle oracle(logits, step, sight);
        const ShardLayout whole = {.tokens = tokens};
        const std::vector<uint32_t> one = Choose(q, k, step, whole, sight);
        EXPECT_EQ(oracle.Complaint(one.data(), whole, kTolerance), "");
        if (tokens % (8 * tile) == 0) ExpectRanksChoose(q, k, step, sight, one);
      }
    }
  }
}

// A row keeps so many of the heaviest, and no fewer than hold what the tolerance leaves.
TEST_F(AntidiagonalTest, AMoveKeepsMoreOrFewerOfTheHeaviest) {
  const int64_t tokens = 4096, tiles = tokens / 64;
  const Rows q = Random(tokens, 4, 64), k = Random(tokens, 2, 64);
  AntidiagonalGateStep step = {.tile = 64, .stride = 8, .scale = 1.0f, .threshold = 0.5f};
  const std::vector<uint32_t> base = Choose(q, k, step, {.tokens = tokens}, Causal(tokens));
  const int64_t words = BlockWords(static_cast<int32_t>(tiles));
  const auto count = [&](const std::vector<uint32_t>& chosen, int64_t row) {
    int64_t blocks = 0;
    for (int64_t w = 0; w < words; ++w) blocks += __builtin_popcount(chosen[row * words + w]);
    return blocks;
  };
  for (const float factor : {0.6f, 1.0f, 1.4f}) {
    for (const float tolerance : {0.01f, 1.0f}) {
      const DeviceBuffer<float> gpu_factor(std::vector<float>{factor});
      const DeviceBuffer<int64_t> work_before(std::vector<int64_t>{-1});
      step.move = {
          .factor = gpu_factor.data(), .tolerance = tolerance, .work_before = work_before.data()};
      const std::vector<uint32_t> moved = Choose(q, k, step, {.tokens = tokens}, Causal(tokens));
      int64_t held = 0, unmoved = 0;
      for (int64_t row = 0; row < 4 * tiles; ++row) {
        unmoved += count(base, row);
        const int64_t own = row % tiles, before = count(base, row), after = count(moved, row);
        const int64_t forced = own == 0 ? 1 : 2;
        const int64_t wanted = std::clamp<int64_t>(
            MovedCount(before, factor, MovePlace(own, static_cast<int32_t>(row / tiles))), forced,
            own + 1);
        for (int64_t w = 0; w < words; ++w) {
          const uint32_t b = base[row * words + w], m = moved[row * words + w];
          ASSERT_EQ((factor < 1 ? m & ~b : b & ~m), 0u) << row;
        }
        // Blocks without mass are not kept, so a row may end before what is wanted.
        EXPECT_LE(after, std::max(wanted, factor < 1 ? before : 0)) << row;
        if (factor < 1) {
          EXPECT_GE(after, wanted) << row;
          EXPECT_TRUE(tolerance < 0.1f || after == wanted) << row;
        }
        held += after > wanted;
      }
      EXPECT_EQ(held > 0, factor < 1 && tolerance < 0.1f);
      EXPECT_EQ(work_before.Read()[0], unmoved);
    }
  }
}

// All keys are alike: of the blocks but the first one and a tile's own, which score the same, even
// heads keep the earliest and odd heads the latest, as the CPU engine does, and as many as their
// budgets say.
TEST_F(AntidiagonalTest, TiesGoWhereTheHeadSays) {
  for (const auto& [tokens, tile, stride] :
       {std::tuple{1024, 64, 16}, {4096, 64, 8}, {16384, 128, 16}, {131072, 64, 16}}) {
    if (SmallShapes() && tokens > 1024) continue;
    const std::vector<int32_t> halves = {1, 3, 3, 1};
    const Rows q = Random(tokens, 4, 64);
    Rows k = Random(tokens, 2, 64);
    for (int64_t i = k.width(); i < tokens * k.width(); ++i) {
      k.bf16[i] = k.bf16[i % k.width()];
      k.floats[i] = k.floats[i % k.width()];
    }
    const int64_t tiles = tokens / tile, words = BlockWords(static_cast<int32_t>(tiles));
    AntidiagonalGateStep step = {.tile = tile,
                                 .stride = stride,
                                 .scale = 0.125f,
                                 .threshold = 1.0f,
                                 .density = 0.3f,
                                 .head_halves = halves.data()};
    const std::vector<uint32_t> chosen = Choose(q, k, step, {.tokens = tokens}, Causal(tokens));
    for (int64_t row = 0; row < 4 * tiles; ++row) {
      const int64_t own = row % tiles;
      const int64_t count = std::max<int64_t>(own - 1, 0),
                    whole = std::clamp<int64_t>(
                        MostBlocks(step.density, static_cast<int32_t>(own + 1)) - 2, 0, count),
                    half = whole / 2, keep = halves[row / tiles] == 1 ? whole - half : whole + half,
                    begin = row / tiles % 2 == 0 ? 1 : own - keep;
      for (int64_t block = 0; block < tiles; ++block) {
        const bool expected =
            block == 0 || block == own || (block >= begin && block < begin + keep);
        ASSERT_EQ(chosen[row * words + block / 32] >> block % 32 & 1, expected ? 1u : 0u)
            << "head " << row / tiles << ", tile " << own << ", block " << block << " of " << tokens
            << " tokens";
      }
    }
    if (tokens > 16384) continue;
    ExpectRanksChoose(q, k, step, Causal(tokens), chosen);
    std::vector<uint32_t> on_cpu(chosen.size());
    reference::Engine engine(2);
    step.query_layout = {.tokens = tokens};
    step.chosen = on_cpu.data();
    reference::ChooseByAntidiagonals(engine, q.View(), k.View(), step);
    EXPECT_TRUE(chosen == on_cpu) << tokens << " tokens";
  }
}

// More heads than a launch takes, each with its own budget. The last one is an even one, so that
// its ties go as they do alone, and has the budget that it has alone.
TEST_F(AntidiagonalTest, BatchesAreWhole) {
  if (SmallShapes()) GTEST_SKIP() << "large";
  constexpr int kHeads = 15;  // by seven
  const int64_t tokens = 65536;
  const Rows q = Random(tokens, kHeads, 64), k = Random(tokens, 1, 64);
  std::vector<int32_t> halves;
  for (int head = 0; head + 1 < kHeads; ++head) halves.push_back(head % 2 == 0 ? 1 : 3);
  halves.push_back(2);
  AntidiagonalGateStep step = {.tile = 64,
                               .stride = 8,
                               .scale = 0.125f,
                               .threshold = 1.0f,
                               .density = 0.05f,
                               .head_halves = halves.data()};
  const std::vector<uint32_t> chosen = Choose(q, k, step, {.tokens = tokens}, Causal(tokens));
  step.head_halves = nullptr;
  int64_t kept = 0, most = 0;
  for (const uint32_t word : chosen) kept += __builtin_popcount(word);
  for (int seen = 1; seen <= 1024; ++seen) {
    most += std::max(std::min(seen, 2), MostBlocks(0.05f, seen));
  }
  EXPECT_EQ(kept, kHeads * most);
  // Each head's rows are those that it has alone.
  Rows last{.floats = {}, .bf16 = {}, .tokens = tokens, .heads = 1, .head_dim = 64};
  for (int64_t i = 0; i < tokens; ++i) {
    const auto row = q.bf16.begin() + (i * kHeads + kHeads - 1) * 64;
    last.bf16.insert(last.bf16.end(), row, row + 64);
  }
  const std::vector<uint32_t> alone = Choose(last, k, step, {.tokens = tokens}, Causal(tokens));
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), chosen.end() - std::ssize(alone)));
}

// A query that is no number takes the mass of its group of queries and of no others.
TEST_F(AntidiagonalTest, WhatIsNoNumberHasNoMass) {
  const int64_t tokens = 1024;
  Rows q = Random(tokens, 2, 64);
  const Rows k = Random(tokens, 1, 64);
  const AntidiagonalGateStep step = {.tile = 64, .stride = 8, .scale = 0.01f, .threshold = 1.0f};
  const std::vector<uint32_t> all = Choose(q, k, step, {.tokens = tokens}, Causal(tokens));
  int64_t kept = 0;
  for (const uint32_t word : all) kept += __builtin_popcount(word);
  EXPECT_EQ(kept, 2 * 16 * 17 / 2);  // whatever is seen has mass
  q.bf16[700 * q.width() + 3] = __float2bfloat16_rn(NAN);
  EXPECT_EQ(Choose(q, k, step, {.tokens = tokens}, Causal(tokens)), all);
}

TEST(AntidiagonalArgumentsTest, ErrorsNameTheArgumentAndWhatIsAllowed) {
  const auto message = [](AntidiagonalGateStep step, int head_dim) {
    const TokenMajor<const Bf16> x = {nullptr, 128, 1, head_dim, head_dim, head_dim};
    step.query_layout.tokens = 128;
    return std::string(ChooseByAntidiagonals(x, x, step, nullptr, nullptr).message());
  };
  EXPECT_THAT(message({.tile = 96}, 64), HasSubstr("tile is 96; 64 and 128 are supported"));
  EXPECT_THAT(message({.stride = 24}, 64), HasSubstr("stride is 24; allowed are 8, 16, 32 and 64"));
  EXPECT_THAT(message({}, 80), HasSubstr("head_dim is 80; 64 and 128 are supported"));
  EXPECT_THAT(message({}, 64), HasSubstr("chosen"));
}

}  // namespace
}  // namespace ringleader::kernels::index
