// The choice of groups of keys on the device against the fp64 oracle, and on several ranks against
// one.
#include "kernels/index/gates/key_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/index/gates/blocks.h"
#include "kernels/reference/testing/packed_documents.h"
#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {
namespace {

using Bf16 = __nv_bfloat16;
using ::testing::HasSubstr;

// fp32 sums of exact products, of logits of up to 60.
constexpr double kTolerance = 2e-4;
constexpr int kTile = 64;

// Values whose bf16 are themselves.
struct Rows {
  std::vector<float> floats;
  std::vector<Bf16> bf16;
  int64_t tokens;
  int heads, head_dim;

  int64_t width() const { return int64_t{heads} * head_dim; }
  std::vector<Bf16> Shard(const ShardLayout& layout) const {
    std::vector<Bf16> local;
    for (int64_t i = 0; i < layout.local_tokens(); ++i) {
      const auto row = bf16.begin() + layout.Position(i) * width();
      local.insert(local.end(), row, row + width());
    }
    return local;
  }
};

struct Choice {
  std::vector<int32_t> groups, bounds;
  int capacity = 0;

  // Groups of the sequence that row [head, tile] keeps, of `rows` in all, ascending.
  std::vector<int64_t> Row(const ShardLayout& layout, int64_t rows, int64_t row) const {
    std::vector<int64_t> kept;
    ShardLayout owner = layout;
    EXPECT_EQ(bounds.at(row), 0);
    for (owner.rank = 0; owner.rank < owner.ranks; ++owner.rank) {
      const int end = bounds.at((owner.rank + 1) * rows + row);
      EXPECT_LE(end, capacity);
      for (int i = bounds.at(owner.rank * rows + row), before = -1; i < end; ++i) {
        const int group = groups.at(row * capacity + i);
        EXPECT_GT(group, before) << "row " << row << ", owner " << owner.rank;
        kept.push_back(owner.Position(int64_t{group} * kGroupKeys) / kGroupKeys);
        before = group;
      }
    }
    std::ranges::sort(kept);
    return kept;
  }
};

// KeyGroupGateStep in fp64, pair by pair.
class Oracle {
 public:
  Oracle(const Rows& q, const Rows& k, const KeyGroupGateStep& step,
         const std::vector<int32_t>& starts)
      : q_(q), k_(k), step_(step), starts_(starts) {}

  // What is wrong with what one rank with the whole sequence keeps. Scores that differ by no more
  // than `tolerance` may go either way.
  std::string Complaint(const Choice& choice, double tolerance) const {
    const int64_t tiles = (q_.tokens + kTile - 1) / kTile;
    for (int head = 0; head < q_.heads; ++head) {
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const auto kept = choice.Row({.tokens = q_.tokens}, q_.heads * tiles, head * tiles + tile);
        const int64_t first = tile * kTile, start = Start(first);
        const auto where = ::testing::PrintToString(std::pair(head, tile));
        if (std::ssize(kept) != MostGroups(step_.density, first, start)) return where + ": number";
        const std::vector<double> scores = Scores(head, tile);
        const auto is_better = [&](int64_t x, int64_t y) {
          if (scores[x] != scores[y]) return scores[x] > scores[y];
          return TiesGoLate(head) ? x > y : x < y;
        };
        int64_t worst_kept = -1, best_left = -1;
        for (int64_t group = start / kGroupKeys; group < first / kGroupKeys; ++group) {
          if (std::ranges::binary_search(kept, group)) {
            if (worst_kept < 0 || is_better(worst_kept, group)) worst_kept = group;
          } else if (best_left < 0 || is_better(group, best_left)) {
            best_left = group;
          }
        }
        if (!kept.empty() &&
            (kept.front() < start / kGroupKeys || kept.back() >= first / kGroupKeys)) {
          return where + ": one that is no candidate";
        }
        if (worst_kept < 0 || best_left < 0 || is_better(worst_kept, best_left)) continue;
        if (tolerance > 0 && scores[best_left] - scores[worst_kept] <= tolerance) continue;
        return where + ": a better one is left";
      }
    }
    return "";
  }

 private:
  int64_t Start(int64_t position) const { return starts_.empty() ? 0 : starts_[position]; }

  std::vector<double> Scores(int head, int64_t tile) const {
    std::vector<double> scores(q_.tokens / kGroupKeys + 1, -INFINITY), logits(q_.tokens);
    for (int64_t i = tile * kTile; i < std::min((tile + 1) * kTile, q_.tokens); ++i) {
      const float* const query = &q_.floats[i * q_.width() + head * q_.head_dim];
      double largest = -INFINITY;
      for (int64_t j = Start(i); j <= i; ++j) {
        const int kv_head = head / (q_.heads / k_.heads);
        const float* const key = &k_.floats[j * k_.width() + kv_head * k_.head_dim];
        double sum = 0.0;
        for (int x = 0; x < q_.head_dim; ++x) sum += double{query[x]} * key[x];
        logits[j] = double{step_.scale} * sum;
        largest = std::max(largest, logits[j]);
      }
      for (int64_t j = Start(i); j <= i; ++j) {
        double& score = scores[j / kGroupKeys];
        score = std::max(score, logits[j] - largest);
      }
    }
    return scores;
  }

  const Rows &q_, &k_;
  const KeyGroupGateStep step_;
  const std::vector<int32_t>& starts_;
};

class KeyGroupsTest : public GpuTest {
 protected:
  Rows Random(int64_t tokens, int heads, int head_dim) {
    std::normal_distribution<float> normal;
    Rows rows{.floats = {}, .bf16 = {}, .tokens = tokens, .heads = heads, .head_dim = head_dim};
    for (int64_t i = 0; i < tokens * rows.width(); ++i) {
      rows.bf16.push_back(__float2bfloat16_rn(normal(random_)));
      rows.floats.push_back(__bfloat162float(rows.bf16.back()));
    }
    return rows;
  }

  // What the rank of `layout` chooses.
  static Choice Choose(const Rows& q, const Rows& k, KeyGroupGateStep step,
                       const ShardLayout& layout, const std::vector<int32_t>& starts) {
    const int64_t n = layout.local_tokens(), tiles = (n + kTile - 1) / kTile;
    const DeviceBuffer<Bf16> queries(q.Shard(layout)), local_keys(k.Shard(layout)), keys(k.bf16);
    const DeviceBuffer<int32_t> local_starts(
        starts.empty() ? std::vector<int32_t>(1) : reference::testing::ShardStarts(starts, layout));
    step.capacity = MostGroups(step.density, (layout.tokens - 1) / kTile * kTile, 0);
    const DeviceBuffer<int32_t> groups(q.heads * tiles * step.capacity),
        bounds((layout.ranks + 1) * q.heads * tiles);
    step.keys = layout.ranks == 1 ? nullptr : keys.data();
    step.query_layout = layout;
    step.document_starts = starts.empty() ? nullptr : local_starts.data();
    step.groups = groups.data();
    step.bounds = bounds.data();
    const TokenMajor<const Bf16> q_view = {queries.data(), n,         q.heads,
                                           q.head_dim,     q.width(), q.head_dim},
                                 k_view = {local_keys.data(), n,         k.heads,
                                           k.head_dim,        k.width(), k.head_dim};
    const DeviceBuffer<char> workspace(
        static_cast<int64_t>(BlockStepWorkspaceBytes(q_view, k_view, step)));
    EXPECT_EQ(RunBlockStep(q_view, k_view, step, workspace.data(), nullptr), absl::OkStatus());
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return {groups.Read(), bounds.Read(), step.capacity};
  }

  static void ExpectRanksChoose(const Rows& q, const Rows& k, const KeyGroupGateStep& step,
                                const std::vector<int32_t>& starts, const Choice& one) {
    const int64_t tiles = q.tokens / kTile;
    for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      for (int rank = 0; rank < 4; ++rank) {
        const ShardLayout layout = {
            .kind = kind, .ranks = 4, .rank = rank, .stripe = kTile, .tokens = q.tokens};
        const Choice choice = Choose(q, k, step, layout, starts);
        const int64_t rows = q.heads * tiles / 4;
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t tile = layout.Position(row % (tiles / 4) * kTile) / kTile;
          ASSERT_EQ(choice.Row(layout, rows, row), one.Row({.tokens = q.tokens}, q.heads * tiles,
                                                           row / (tiles / 4) * tiles + tile))
              << "layout " << static_cast<int>(kind) << ", rank " << rank << ", row " << row;
        }
      }
    }
  }

  std::mt19937 random_{17};
};

TEST_F(KeyGroupsTest, AreTheOraclesAndOnRanksThoseOfOne) {
  for (const auto& [tokens, heads, head_dim] :
       {std::tuple{1000, 4, 64}, {1024, 2, 128}, {2560, 4, 128}, {3072, 2, 64}, {40, 2, 64}}) {
    if (SmallShapes() && tokens > 1024) continue;
    const Rows q = Random(tokens, heads, head_dim), k = Random(tokens, heads / 2, head_dim);
    const auto documents = reference::testing::DocumentStarts(
        tokens, reference::testing::RandomDocuments(tokens, kTile, random_));
    for (const bool packed : {false, true}) {
      for (const float density : {0.1f, 0.35f, 1.0f}) {
        SCOPED_TRACE(::testing::Message()
                     << tokens << " tokens, density " << density << (packed ? ", documents" : ""));
        const KeyGroupGateStep step = {.scale = 0.7f, .density = density};
        const auto starts = packed ? documents : std::vector<int32_t>();
        const Choice one = Choose(q, k, step, {.tokens = tokens}, starts);
        EXPECT_EQ(Oracle(q, k, step, starts).Complaint(one, kTolerance), "");
        if (tokens % (8 * kTile) == 0) ExpectRanksChoose(q, k, step, starts, one);
      }
    }
  }
}

// Small whole numbers have exact products, and most groups score as others do: there is one right
// choice.
TEST_F(KeyGroupsTest, TiesGoWhereTheyShould) {
  constexpr int64_t kTokens = 1024;
  const std::vector<int32_t> no_documents;
  std::uniform_int_distribution<int> few(-1, 1);
  Rows q{.floats = {}, .bf16 = {}, .tokens = kTokens, .heads = 2, .head_dim = 64}, k = q;
  k.heads = 1;
  for (Rows* const rows : {&q, &k}) {
    for (int64_t i = 0; i < kTokens * rows->width(); ++i) {
      const bool is_zero = rows == &k && i % 64 > 2;
      const float value = is_zero ? 0.0f : static_cast<float>(few(random_));
      rows->floats.push_back(value);
      rows->bf16.push_back(__float2bfloat16_rn(value));
    }
  }
  for (const float density : {0.1f, 0.5f}) {
    const KeyGroupGateStep step = {.scale = 1.0f, .density = density};
    const Choice one = Choose(q, k, step, {.tokens = kTokens}, no_documents);
    EXPECT_EQ(Oracle(q, k, step, no_documents).Complaint(one, 0.0), "");
    ExpectRanksChoose(q, k, step, no_documents, one);
  }
}

// Tiles whose scores take several launches, and chunks of keys: each head's rows are those that it
// has alone. The last head is an even one, so that its ties go as they do alone.
TEST_F(KeyGroupsTest, SlabsAreWhole) {
  if (SmallShapes()) GTEST_SKIP() << "large";
  constexpr int64_t kTokens = 65536, kTiles = kTokens / kTile;
  constexpr int kHeads = 11;
  const Rows q = Random(kTokens, kHeads, 64), k = Random(kTokens, 1, 64);
  const KeyGroupGateStep step = {.scale = 0.125f, .density = 0.05f};
  const ShardLayout whole = {.tokens = kTokens};
  const Choice all = Choose(q, k, step, whole, {});
  Rows last{.floats = {}, .bf16 = {}, .tokens = kTokens, .heads = 1, .head_dim = 64};
  for (int64_t i = 0; i < kTokens; ++i) {
    const auto row = q.bf16.begin() + ((i + 1) * kHeads - 1) * 64;
    last.bf16.insert(last.bf16.end(), row, row + 64);
  }
  const Choice alone = Choose(last, k, step, whole, {});
  for (int64_t tile = 0; tile < kTiles; ++tile) {
    const auto kept = alone.Row(whole, kTiles, tile);
    ASSERT_EQ(std::ssize(kept), MostGroups(0.05f, tile * kTile, 0));
    ASSERT_EQ(kept, all.Row(whole, kHeads * kTiles, (kHeads - 1) * kTiles + tile)) << tile;
  }
}

TEST(KeyGroupsArgumentsTest, ErrorsNameTheArgumentAndWhatIsAllowed) {
  const auto message = [](KeyGroupGateStep step, int head_dim) {
    const TokenMajor<const Bf16> x = {nullptr, 1024, 1, head_dim, head_dim, head_dim};
    if (step.query_layout.tokens == 0) step.query_layout.tokens = 1024;
    return std::string(ChooseKeyGroups(x, x, step, nullptr, nullptr).message());
  };
  EXPECT_THAT(message({.scale = 1.0f}, 80), HasSubstr("head_dim is 80; 64 and 128 are supported"));
  EXPECT_THAT(message({}, 64), HasSubstr("scale is 0; it must be above 0"));
  EXPECT_THAT(message({.scale = 1.0f, .density = 1.5f}, 64),
              HasSubstr("density is 1.5; it must be above 0 and at most 1"));
  EXPECT_THAT(message({.scale = 1.0f, .capacity = 7}, 64), HasSubstr("capacity is 7"));
  EXPECT_THAT(
      message(
          {.query_layout = {.kind = LayoutKind::kStriped, .ranks = 4, .stripe = 32, .tokens = 4096},
           .scale = 1.0f},
          64),
      HasSubstr("tokens of a chunk of the layout is 32"));
  EXPECT_THAT(message({.scale = 1.0f, .capacity = 100}, 64), HasSubstr("groups"));
}

}  // namespace
}  // namespace ringleader::kernels::index
