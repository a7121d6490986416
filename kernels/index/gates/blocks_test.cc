// Block gates and tile lists on the device, against kernels/reference.
#include "kernels/index/gates/blocks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/index/testing/block_shapes.h"
#include "kernels/reference/gates/block_gate.h"
#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {
namespace {

using ::testing::HasSubstr;

using BlocksTest = GpuTest;

// The lists of one owner from the device, compared with the reference's rows and their transpose.
void CheckLists(const DeviceBuffer<uint32_t>& chosen, const std::vector<char>& selected,
                const Shape& s, const ShardLayout& query, const ShardLayout& key,
                const LocalSight& sight) {
  const reference::TileCsr want = reference::CsrOfBlocks(selected, s.heads, s.tile, s.block_size,
                                                         query, key, sight.host.seen());
  const int query_tiles = static_cast<int>((query.local_tokens() + s.tile - 1) / s.tile);
  const int key_tiles = static_cast<int>((key.local_tokens() + s.tile - 1) / s.tile);
  const int64_t capacity = std::max<int64_t>(1, static_cast<int64_t>(want.columns.size()));
  DeviceBuffer<int32_t> row_offsets(int64_t{s.heads} * (query_tiles + 1)), columns(capacity),
      column_offsets(int64_t{s.heads} * (key_tiles + 1)), rows(capacity);
  ASSERT_EQ(BuildTileLists({.chosen = chosen.data(),
                            .query_layout = query,
                            .key_layout = key,
                            .seen = sight.device.seen(),
                            .heads = s.heads,
                            .tile = s.tile,
                            .block_size = s.block_size,
                            .capacity = capacity,
                            .row_offsets = row_offsets.data(),
                            .columns = columns.data(),
                            .column_offsets = column_offsets.data(),
                            .rows = rows.data()},
                           nullptr),
            absl::OkStatus());
  EXPECT_EQ(row_offsets.Read(), want.row_offsets);
  std::vector<int32_t> got = columns.Read();
  got.resize(want.columns.size());
  EXPECT_EQ(got, want.columns);
  std::vector<int32_t> want_offsets, want_rows;
  for (int h = 0; h < s.heads; ++h) {
    for (int b = 0; b <= key_tiles; ++b) {
      want_offsets.push_back(static_cast<int32_t>(want_rows.size()));
      for (int a = 0; b < key_tiles && a < query_tiles; ++a) {
        const int row = h * (query_tiles + 1) + a;
        const auto begin = want.columns.begin();
        if (std::binary_search(begin + want.row_offsets[row], begin + want.row_offsets[row + 1],
                               b)) {
          want_rows.push_back(a);
        }
      }
    }
  }
  EXPECT_EQ(column_offsets.Read(), want_offsets);
  got = rows.Read();
  got.resize(want_rows.size());
  EXPECT_EQ(got, want_rows);
}

// In how many of `rows` x `blocks` choices the device's bits differ from the reference's; `kept`
// counts the device's.
int64_t Differences(const DeviceBuffer<uint32_t>& chosen, const std::vector<char>& selected,
                    int64_t rows, int blocks, int64_t* kept) {
  const std::vector<uint32_t> bits = chosen.Read();
  int64_t different = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int b = 0; b < blocks; ++b) {
      const bool got = bits[row * BlockWords(blocks) + b / 32] >> (b % 32) & 1;
      different += got != (selected[row * blocks + b] != 0);
      *kept += got;
    }
  }
  return different;
}

// The choice moved by factors, for which exponentials are taken: they may differ in their last bit,
// and a row by one block.
void CheckMoved(reference::Engine& engine, reference::BlockTopKArgs args, BlockGateArgs gpu_args,
                const DeviceBuffer<uint32_t>& chosen, int64_t rows, int blocks) {
  for (const auto& [factor, tolerance] :
       {std::pair{0.5f, 0.5f}, {0.5f, 0.02f}, {0.8f, 0.1f}, {1.4f, 0.1f}}) {
    const DeviceBuffer<float> gpu_factor(std::vector<float>{factor});
    args.move = {.factor = &factor, .tolerance = tolerance};
    gpu_args.move = {.factor = gpu_factor.data(), .tolerance = tolerance};
    const std::vector<char> moved = reference::SelectBlocks(engine, args);
    ASSERT_EQ(SelectBlocksByMean(gpu_args, nullptr), absl::OkStatus());
    int64_t kept = 0;
    const int64_t different = Differences(chosen, moved, rows, blocks, &kept);
    EXPECT_LE(different, kept / 1000) << factor << " " << tolerance;
  }
}

// The choice of heads that have budgets of their own.
void CheckHeadBudgets(reference::Engine& engine, reference::BlockTopKArgs args,
                      BlockGateArgs gpu_args, const DeviceBuffer<uint32_t>& chosen, int64_t rows,
                      int blocks) {
  std::vector<int32_t> halves;
  for (int head = 0; head < args.q.heads; ++head) halves.push_back((head + 2) % 3 + 1);
  const DeviceBuffer<int32_t> gpu_halves(halves);
  args.head_halves = halves.data();
  gpu_args.head_halves = gpu_halves.data();
  const std::vector<char> selected = reference::SelectBlocks(engine, args);
  ASSERT_EQ(SelectBlocksByMean(gpu_args, nullptr), absl::OkStatus());
  int64_t kept = 0;
  EXPECT_EQ(Differences(chosen, selected, rows, blocks, &kept), 0);
}

// The sums that a rank makes of its keys are those of its tiles among all.
void CheckLocalSums(const Shape& s, const std::vector<Bf16>& k, const ShardLayout& layout,
                    const MeanKeys& counted, const std::vector<float>& key_sums) {
  const int64_t row = int64_t{s.kv_heads} * s.head_dim, n = layout.local_tokens(),
                tiles = (n + s.tile - 1) / s.tile;
  const DeviceBuffer<Bf16> local(Shard(k, row, layout));
  DeviceBuffer<float> sums(tiles * row);
  ASSERT_EQ(TileKeySums({local.data(), n, s.kv_heads, s.head_dim, row, s.head_dim},
                        {.layout = layout, .counted = counted, .tile = s.tile, .sums = sums.data()},
                        nullptr),
            absl::OkStatus());
  const std::vector<float> got = sums.Read();
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const auto want = key_sums.begin() + layout.Position(tile * s.tile) / s.tile * row;
    ASSERT_TRUE(std::equal(want, want + row, got.begin() + tile * row)) << tile;
  }
}

// What positions say, against the reference.
void CheckFixedBlocks(reference::Engine& engine, const Shape& s, const ShardLayout& query,
                      const LocalSight& sight) {
  FixedBlocksStep step = {.kept = {.local = 1, .sinks = 2, .stride = 5},
                          .query_layout = query,
                          .seen = sight.host.seen(),
                          .heads = s.heads,
                          .tile = s.tile};
  const int64_t tiles = (query.local_tokens() + s.tile - 1) / s.tile,
                blocks = (s.tokens + s.tile - 1) / s.tile;
  std::vector<uint32_t> expected(s.heads * tiles * BlockWords(static_cast<int32_t>(blocks)));
  step.chosen = expected.data();
  reference::RunBlockStep(engine, {}, {}, step);
  const DeviceBuffer<uint32_t> chosen(static_cast<int64_t>(expected.size()));
  step.seen = sight.device.seen();
  step.chosen = chosen.data();
  ASSERT_EQ(KeepFixedBlocks(step, nullptr), absl::OkStatus());
  EXPECT_EQ(chosen.Read(), expected);
}

// The choice by means, its lists for all owners and what heads' budgets and moves make of it,
// against the reference.
void CheckMeanGate(const Shape& s, const std::vector<Bf16>& q, const std::vector<Bf16>& k) {
  reference::Engine engine(2);
  const int64_t tiles = (s.tokens + s.tile - 1) / s.tile;
  const int blocks = static_cast<int>((s.tokens + s.block_size - 1) / s.block_size);
  const int64_t q_row = int64_t{s.heads} * s.head_dim, k_row = int64_t{s.kv_heads} * s.head_dim;
  const std::vector<float> k_floats = Floats(k);
  ShardLayout query = {
      .kind = s.kind, .ranks = s.ranks, .rank = s.ranks - 1, .stripe = 128, .tokens = s.tokens};
  const LocalSight sight(s, query);
  std::vector<float> key_sums(tiles * k_row);
  reference::TileKeySums(
      engine, {k_floats.data(), s.tokens, s.kv_heads, s.head_dim, k_row, s.head_dim},
      {.counted = sight.host.counted(), .tile = s.tile, .sums = key_sums.data()});
  DeviceBuffer<Bf16> gpu_k(k);
  DeviceBuffer<float> gpu_key_sums(tiles * k_row);
  ASSERT_EQ(
      TileKeySums({gpu_k.data(), s.tokens, s.kv_heads, s.head_dim, k_row, s.head_dim},
                  {.counted = sight.device.counted(), .tile = s.tile, .sums = gpu_key_sums.data()},
                  nullptr),
      absl::OkStatus());
  EXPECT_EQ(gpu_key_sums.Read(), key_sums);
  CheckLocalSums(s, k, query, sight.device.counted(), key_sums);
  CheckFixedBlocks(engine, s, query, sight);

  const std::vector<Bf16> q_local = Shard(q, q_row, query);
  const std::vector<float> q_floats = Floats(q_local);
  const int64_t n = query.local_tokens(), query_tiles = (n + s.tile - 1) / s.tile;
  reference::BlockTopKArgs args = {
      .q = {q_floats.data(), n, s.heads, s.head_dim, q_row, s.head_dim},
      .query_layout = query,
      .seen = sight.host.seen(),
      .key_sums = key_sums.data(),
      .counted = sight.host.counted(),
      .kv_heads = s.kv_heads,
      .tile = s.tile,
      .block_size = s.block_size,
      .topk_blocks = s.topk,
      .scale = 0.5f};
  const std::vector<char> selected = reference::SelectBlocks(engine, args);
  DeviceBuffer<Bf16> gpu_q(q_local);
  DeviceBuffer<float> query_sums(query_tiles * q_row), means(k_row * blocks);
  DeviceBuffer<uint32_t> chosen(s.heads * query_tiles * BlockWords(blocks));
  ASSERT_EQ(TileSums({gpu_q.data(), n, s.heads, s.head_dim, q_row, s.head_dim}, s.tile,
                     query_sums.data(), nullptr),
            absl::OkStatus());
  BlockGateArgs gpu_args = {.query_sums = query_sums.data(),
                            .key_sums = gpu_key_sums.data(),
                            .counted = sight.device.counted(),
                            .query_layout = query,
                            .seen = sight.device.seen(),
                            .heads = s.heads,
                            .kv_heads = s.kv_heads,
                            .head_dim = s.head_dim,
                            .tile = s.tile,
                            .block_size = s.block_size,
                            .topk_blocks = s.topk,
                            .scale = args.scale,
                            .queries = s.tile,
                            .means = means.data(),
                            .chosen = chosen.data()};
  ASSERT_EQ(SelectBlocksByMean(gpu_args, nullptr), absl::OkStatus());
  int64_t kept = 0;
  ASSERT_EQ(Differences(chosen, selected, s.heads * query_tiles, blocks, &kept), 0);
  for (int owner = 0; owner < s.ranks; ++owner) {
    ShardLayout key = query;
    key.rank = owner;
    CheckLists(chosen, selected, s, query, key, sight);
  }
  CheckHeadBudgets(engine, args, gpu_args, chosen, s.heads * query_tiles, blocks);
  CheckMoved(engine, args, gpu_args, chosen, s.heads * query_tiles, blocks);
}

TEST_F(BlocksTest, MeanGateAndListsEqualTheReference) {
  for (const Shape& s :
       {Shape{LayoutKind::kContiguous, 1, 1000, 4, 2, 64, 64, 128, 3},
        Shape{LayoutKind::kStriped, 4, 8192, 6, 2, 128, 128, 512, 2},
        Shape{LayoutKind::kZigzag, 2, 8192, 4, 4, 128, 128, 128, 8},
        Shape{LayoutKind::kContiguous, 2, 4096, 2, 1, 128, 64, 64, 0},
        Shape{LayoutKind::kContiguous, 1, 1000, 4, 2, 64, 64, 128, 3, true},
        Shape{LayoutKind::kStriped, 4, 8192, 6, 2, 128, 128, 512, 2, true},
        Shape{LayoutKind::kZigzag, 2, 8192, 4, 4, 128, 64, 128, 8, true},
        Shape{LayoutKind::kContiguous, 1, 1000, 4, 2, 64, 64, 128, 3, true, Sight::Mask::kFull},
        Shape{LayoutKind::kStriped, 4, 8192, 6, 2, 128, 128, 512, 2, false, Sight::Mask::kFull},
        Shape{LayoutKind::kZigzag, 2, 8192, 4, 4, 128, 64, 128, 8, true, Sight::Mask::kPrefix},
        Shape{LayoutKind::kStriped, 4, 8192, 6, 2, 128, 64, 512, 2, true, Sight::Mask::kBlocks},
        Shape{LayoutKind::kStriped, 2, 65536, 2, 1, 64, 128, 128, 64}}) {
    SCOPED_TRACE(::testing::Message()
                 << s.tokens << " tokens, layout " << static_cast<int>(s.kind));
    if (SmallShapes() && s.tokens > 8192) continue;
    // Small integers: equal scores are common, so that the order of ties shows.
    std::vector<Bf16> q(s.tokens * s.heads * s.head_dim), k(s.tokens * s.kv_heads * s.head_dim);
    for (Bf16& x : q) x = __float2bfloat16_rn(static_cast<float>(random_() % 3) - 1);
    for (Bf16& x : k) x = __float2bfloat16_rn(static_cast<float>(random_() % 8 == 0));
    CheckMeanGate(s, q, k);
  }
}

// 131,072 tokens whose keys are all alike, or all but for a few.
TEST_F(BlocksTest, TiesOfLongSequencesAreTheReferences) {
  if (SmallShapes()) GTEST_SKIP() << "large";
  for (const Shape& s : {Shape{LayoutKind::kContiguous, 1, 131072, 2, 1, 64, 128, 1024, 8},
                         Shape{LayoutKind::kStriped, 4, 131072, 4, 2, 64, 128, 128, 32},
                         Shape{LayoutKind::kZigzag, 2, 131072, 2, 1, 64, 128, 128, 32, true}}) {
    SCOPED_TRACE(::testing::Message() << "layout " << static_cast<int>(s.kind));
    std::vector<Bf16> q(s.tokens * s.heads * s.head_dim);
    for (Bf16& x : q) x = __float2bfloat16_rn(static_cast<float>(random_() % 3) - 1);
    std::vector<Bf16> k(s.tokens * s.kv_heads * s.head_dim, __float2bfloat16_rn(1.0f));
    CheckMeanGate(s, q, k);
    for (int i = 0; i < 100; ++i) k[random_() % k.size()] = __float2bfloat16_rn(2.0f);
    CheckMeanGate(s, q, k);
  }
}

// More blocks than are looked up at once, and blocks of one, two and many tiles.
TEST_F(BlocksTest, ListsOfRandomChoicesEqualTheReference) {
  for (const Shape& s : {Shape{LayoutKind::kStriped, 4, 262144, 1, 1, 64, 64, 64, 0},
                         Shape{LayoutKind::kZigzag, 2, 32768, 3, 1, 64, 64, 128, 0, true},
                         Shape{LayoutKind::kStriped, 2, 65536, 2, 1, 64, 64, 1024, 0, true}}) {
    SCOPED_TRACE(::testing::Message() << s.tokens << " tokens, blocks of " << s.block_size);
    if (SmallShapes() && s.tokens > 32768) continue;
    ShardLayout query = {
        .kind = s.kind, .ranks = s.ranks, .rank = 1, .stripe = 128, .tokens = s.tokens};
    const LocalSight sight(s, query);
    const int64_t rows = s.heads * (query.local_tokens() / s.tile);
    const int blocks = static_cast<int>(s.tokens / s.block_size);
    std::vector<char> selected(rows * blocks);
    std::vector<uint32_t> bits(rows * BlockWords(blocks));
    for (int64_t row = 0; row < rows; ++row) {
      for (int b = 0; b < blocks; ++b) {
        if (random_() % 16 > static_cast<uint32_t>(row % 5)) continue;
        selected[row * blocks + b] = 1;
        bits[row * BlockWords(blocks) + b / 32] |= 1u << b % 32;
      }
    }
    const DeviceBuffer<uint32_t> chosen(bits);
    for (int owner = 0; owner < s.ranks; ++owner) {
      ShardLayout key = query;
      key.rank = owner;
      CheckLists(chosen, selected, s, query, key, sight);
    }
  }
}

TEST(BlocksArgumentsTest, ErrorsNameTheArgumentAndWhatIsAllowed) {
  TileListsArgs lists;
  lists.heads = 1;
  lists.block_size = 100;
  EXPECT_THAT(BuildTileLists(lists, nullptr).message(),
              HasSubstr("block_size is 100; allowed are multiples of 128"));
}

}  // namespace
}  // namespace ringleader::kernels::index
