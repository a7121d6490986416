// Block gates, exact block mass and tile lists on the device, against kernels/reference and
// doubles.
#include "kernels/index/gates/blocks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <tuple>

#include "kernels/index/testing/gate_rows.h"
#include "kernels/reference/gates/block_gate.h"
#include "kernels/reference/testing/sight.h"
#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {
namespace {

using Bf16 = __nv_bfloat16;
using reference::testing::Sight;
using ::testing::HasSubstr;

struct Shape {
  LayoutKind kind;
  int ranks;
  int64_t tokens;
  int heads, kv_heads, head_dim, tile, block_size, topk;
  bool documents = false;  // several in the sequence
  Sight::Mask mask = Sight::Mask::kCausal;
  float logits = 2.0f;  // their standard deviation, where all queries count

  Sight SightOf() const {
    const std::vector<int64_t> several = {0, 1, tile, tokens / 8 + 3, tokens / 2, tokens - 70};
    return Sight(mask, tokens, documents ? several : std::vector<int64_t>());
  }
};

using BlocksTest = GpuTest;

std::vector<float> Floats(const std::vector<Bf16>& in) {
  std::vector<float> out;
  out.reserve(in.size());
  for (const Bf16 x : in) out.push_back(__bfloat162float(x));
  return out;
}

// Rows of `whole` [tokens, width] that `layout`'s rank has.
template <typename T>
std::vector<T> Shard(const std::vector<T>& whole, int64_t width, const ShardLayout& layout) {
  std::vector<T> out;
  for (int64_t i = 0; i < layout.local_tokens(); ++i) {
    const auto row = whole.begin() + layout.Position(i) * width;
    out.insert(out.end(), row, row + width);
  }
  return out;
}

// What a rank's queries see.
struct LocalSight {
  const Sight whole;
  const reference::testing::RankSight host;
  const DeviceSight device;

  LocalSight(const Shape& s, const ShardLayout& layout)
      : whole(s.SightOf()), host(whole.Of(layout)), device(host) {}
};

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

TEST_F(BlocksTest, MeanGateAndListsEqualTheReference) {
  reference::Engine engine(2);
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
    const int64_t tiles = (s.tokens + s.tile - 1) / s.tile;
    const int blocks = static_cast<int>((s.tokens + s.block_size - 1) / s.block_size);
    const int64_t q_row = int64_t{s.heads} * s.head_dim, k_row = int64_t{s.kv_heads} * s.head_dim;
    const std::vector<float> k_floats = Floats(k);
    std::vector<float> key_sums(tiles * k_row);
    reference::TileKeySums(engine,
                           {k_floats.data(), s.tokens, s.kv_heads, s.head_dim, k_row, s.head_dim},
                           s.tile, key_sums.data());
    DeviceBuffer<Bf16> gpu_k(k);
    DeviceBuffer<float> gpu_key_sums(tiles * k_row);
    ASSERT_EQ(TileSums({gpu_k.data(), s.tokens, s.kv_heads, s.head_dim, k_row, s.head_dim}, s.tile,
                       gpu_key_sums.data(), nullptr),
              absl::OkStatus());
    EXPECT_EQ(gpu_key_sums.Read(), key_sums);

    ShardLayout query = {
        .kind = s.kind, .ranks = s.ranks, .rank = s.ranks - 1, .stripe = 128, .tokens = s.tokens};
    const LocalSight sight(s, query);
    const std::vector<Bf16> q_local = Shard(q, q_row, query);
    const std::vector<float> q_floats = Floats(q_local);
    const int64_t n = query.local_tokens(), query_tiles = (n + s.tile - 1) / s.tile;
    reference::BlockTopKArgs args = {
        .q = {q_floats.data(), n, s.heads, s.head_dim, q_row, s.head_dim},
        .query_layout = query,
        .seen = sight.host.seen(),
        .key_sums = key_sums.data(),
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
    CheckMoved(engine, args, gpu_args, chosen, s.heads * query_tiles, blocks);
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

TEST_F(BlocksTest, BlockMassMatchesDoubleAndIsKeptByDensity) {
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
    const auto q = Normal(s.tokens * q_row, s.logits), k = Normal(s.tokens * k_row, 1.0f);
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
TEST_F(BlocksTest, BlockMassIsTheSameOnAnyRank) {
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
TEST_F(BlocksTest, WhatIsNoNumberHasNoMass) {
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
      } else if (tile == 64) {
        ASSERT_EQ(found[i], 0) << i;
      } else {
        ASSERT_LE(found[i], whole[i]) << i;  // the tile's other 64 queries have theirs
        ASSERT_EQ(found[i] > 0, i % blocks <= kBroken / tile) << i;
      }
    }
  }
}

TEST_F(BlocksTest, AdaptedDensityFavoursHeadsOfLowRecall) {
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

TEST(BlocksArgumentsTest, ErrorsNameTheArgumentAndWhatIsAllowed) {
  EXPECT_THAT(BlockMass({nullptr, 64, 1, 80, 80, 80}, {nullptr, 64, 1, 80, 80, 80},
                        {.query_layout = {.tokens = 64}, .scale = 1.0f}, nullptr, nullptr)
                  .message(),
              HasSubstr("head_dim is 80"));
  TileListsArgs lists;
  lists.heads = 1;
  lists.block_size = 100;
  EXPECT_THAT(BuildTileLists(lists, nullptr).message(),
              HasSubstr("block_size is 100; allowed are multiples of 128"));
  EXPECT_THAT(AdaptDensity({.heads = 2000, .density = 0.1f}, nullptr).message(),
              HasSubstr("heads is 2000"));
}

}  // namespace
}  // namespace ringleader::kernels::index
