#include "kernels/reference/gates/key_group_gate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/reference/math/fused.h"
#include "kernels/reference/math/panels.h"
#include "kernels/reference/tiles/tile_lists.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::reference {

namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
// Keys whose logits are in memory at once: whole groups and panels.
constexpr int kChunk = 512;
// Products of a tile of queries with a chunk, and the queries.
constexpr int64_t kGateFloats = int64_t{kGroupTile} * (kChunk + kScoreDims);

// Narrow rows, `stride` bytes apart, to dense fp32.
void Widen(const uint8_t* rows, int64_t stride, int64_t count, float* wide) {
  static const auto values = [] {
    std::array<float, 256> of_codes;
    for (int code = 0; code < 256; ++code) of_codes[code] = FromE4m3(static_cast<uint8_t>(code));
    return of_codes;
  }();
  for (int64_t i = 0; i < count; ++i) {
    for (int x = 0; x < kScoreDims; ++x) wide[i * kScoreDims + x] = values[rows[i * stride + x]];
  }
}

// The narrow keys that a KV head's queries are scored by, as PackTransposed leaves them.
struct NarrowKeys {
  std::vector<float> all;
  std::vector<float> sample;  // those that lie where SampleKey says
};

// One tile of queries of one head on its way through the keys that it sees. `start`: where the
// document of its first query starts.
struct QueryTile {
  int head = 0;
  int64_t index = 0;
  int rows = 0;
  int64_t first = 0, start = 0;

  int64_t first_group() const { return start / kGroupKeys; }
  int64_t end_group() const { return first / kGroupKeys; }
};

class KeyGroupGate {
 public:
  KeyGroupGate(const TileMath& math, int heads, const KeyGroupGateStep& step)
      : math_(math),
        heads_(heads),
        tokens_(step.query_layout.local_tokens()),
        step_(step),
        budget_(step.budget()),
        tiles_(TileCount(tokens_, step.tile)) {}

  // For the heads from `head` on that choose together. keys: theirs. memory: kGateFloats.
  void Choose(int head, int64_t index, const NarrowKeys& keys, float* memory) const {
    const int64_t begin = index * step_.tile;
    QueryTile tile = {.head = head,
                      .index = index,
                      .rows = static_cast<int>(std::min<int64_t>(step_.tile, tokens_ - begin)),
                      .first = step_.query_layout.Position(begin),
                      .start = step_.document_starts == nullptr ? 0 : step_.document_starts[begin]};
    const int32_t halves = HalvesOf(step_.head_halves, head);
    const int32_t kept = budget_.MostGroups(tile.first, tile.start, halves);
    if (kept == 0) return Write(tile, {});
    const bool is_sampled = budget_.IsSampled(tile.first, tile.start, halves, step_.heads_together);
    std::vector<float> scores = Scores(tile, keys, is_sampled, memory);
    while (++tile.head < head + step_.heads_together) {
      const std::vector<float> others = Scores(tile, keys, is_sampled, memory);
      std::ranges::transform(scores, others, scores.begin(),
                             [](float x, float y) { return std::max(x, y); });
    }
    tile.head = head;
    Write(tile, Best(tile, scores, kept));
  }

 private:
  // Calls take(row, key, product) for the visible pairs of the tile's queries, which are in memory,
  // and the packed keys [begin, end), which lie at position(key), ascending. What is not a number
  // has no say.
  template <typename Position, typename Take>
  void ForEachPair(const QueryTile& tile, const std::vector<float>& packed,
                   const Position& position, int64_t begin, int64_t end, float* memory,
                   const Take& take) const {
    for (int64_t chunk = begin / math_.panel * math_.panel; chunk < end; chunk += kChunk) {
      const int64_t keys = std::min<int64_t>(kChunk, end - chunk);
      math_.gemm(tile.rows, static_cast<int>(RoundUp(keys, math_.panel)), kScoreDims,
                 memory + int64_t{kGroupTile} * kChunk, kScoreDims, 1,
                 packed.data() + chunk * kScoreDims, int64_t{kScoreDims} * math_.panel, memory,
                 kChunk, false);
      for (int i = 0; i < tile.rows; ++i) {
        const int64_t local = tile.index * step_.tile + i;
        const int64_t start = step_.document_starts == nullptr ? 0 : step_.document_starts[local];
        for (int64_t j = std::max(chunk, begin); j < chunk + keys; ++j) {
          if (position(j) < start) continue;
          if (position(j) > tile.first + i) break;
          const float product = memory[int64_t{i} * kChunk + j - chunk];
          if (!std::isnan(product)) take(i, j, product);
        }
      }
    }
  }

  // Returns the scores that the tile's head gives the groups [first_group, end_group).
  std::vector<float> Scores(const QueryTile& tile, const NarrowKeys& keys, bool is_sampled,
                            float* memory) const {
    const int64_t groups = tile.end_group() - tile.first_group();
    Widen(step_.queries + (tile.index * kGroupTile * heads_ + tile.head) * kScoreDims,
          int64_t{heads_} * kScoreDims, tile.rows, memory + int64_t{kGroupTile} * kChunk);
    std::vector<float> of_row(tile.rows * groups, kNegativeInfinity),
        references(tile.rows, kNegativeInfinity);
    const auto compare = [&](int row, int64_t, float product) {
      references[row] = std::max(references[row], product);
    };
    ForEachPair(
        tile, keys.all, [](int64_t key) { return key; }, tile.start, tile.first + tile.rows, memory,
        [&](int row, int64_t key, float product) {
          if (!is_sampled || key >= tile.first) compare(row, key, product);
          if (key >= tile.first) return;
          float& most = of_row[row * groups + key / kGroupKeys - tile.first_group()];
          most = std::max(most, product);
        });
    if (is_sampled) {
      ForEachPair(
          tile, keys.sample, [](int64_t i) { return SampleKey(static_cast<int32_t>(i)); },
          tile.start / kSampleEvery, tile.first / kSampleEvery, memory, compare);
    }
    std::vector<float> scores(groups, kNegativeInfinity);
    for (int i = 0; i < tile.rows; ++i) {
      for (int64_t g = 0; g < groups; ++g) {
        const float score = std::min(of_row[i * groups + g] - references[i], 0.0f);
        if (score > scores[g]) scores[g] = score;
      }
    }
    return scores;
  }

  // The `kept` best groups, as groups of the sequence.
  std::vector<int64_t> Best(const QueryTile& tile, const std::vector<float>& scores,
                            int32_t kept) const {
    std::vector<int64_t> groups(scores.size());
    std::iota(groups.begin(), groups.end(), int64_t{0});
    const bool late = TiesGoLate(tile.head / step_.heads_together);
    std::nth_element(groups.begin(), groups.begin() + kept - 1, groups.end(),
                     [&](int64_t x, int64_t y) {
                       if (scores[x] != scores[y]) return scores[x] > scores[y];
                       return late ? x > y : x < y;
                     });
    groups.resize(kept);
    for (int64_t& group : groups) group += tile.first_group();
    return groups;
  }

  void Write(const QueryTile& tile, const std::vector<int64_t>& kept) const {
    uint32_t* const row = step_.chosen + tile.head / step_.heads_together * step_.rows[tiles_] +
                          step_.rows[tile.index];
    std::fill_n(row, BlockWords(static_cast<int32_t>(tile.end_group())), 0u);
    for (const int64_t group : kept) row[group / 32] |= 1u << group % 32;
  }

  const TileMath& math_;
  const int heads_;
  const int64_t tokens_;
  const KeyGroupGateStep& step_;
  const KeyGroupBudget budget_;
  const int64_t tiles_;
};

}  // namespace

void ChooseKeyGroups(Engine& engine, int heads, int kv_heads, const KeyGroupGateStep& step) {
  const TileMath& math = engine.math();
  const KeyGroupGate gate(math, heads, step);
  const int64_t tokens = step.query_layout.tokens, group = heads / kv_heads,
                tiles = TileCount(step.query_layout.local_tokens(), step.tile),
                rows = group / step.heads_together;
  NarrowKeys keys;
  std::vector<float> wide(tokens * kScoreDims);
  // The keys in `wide`.
  const auto pack = [&](int64_t count, std::vector<float>& packed) {
    packed.resize(RoundUp(count, math.panel) * kScoreDims);
    PackTransposed(wide.data(), kScoreDims, static_cast<int>(count), kScoreDims, math.panel,
                   packed.data());
  };
  const int64_t sampled = tokens / kSampleEvery;
  for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
    Widen(step.keys + int64_t{kv_head} * kScoreDims, int64_t{kv_heads} * kScoreDims, tokens,
          wide.data());
    pack(tokens, keys.all);
    for (int64_t i = 0; i < sampled; ++i) {
      std::copy_n(wide.data() + int64_t{SampleKey(static_cast<int32_t>(i))} * kScoreDims,
                  kScoreDims, wide.data() + i * kScoreDims);
    }
    pack(sampled, keys.sample);
    engine.pool().For(rows * tiles, [&](int64_t task, int worker) {
      gate.Choose(static_cast<int>(kv_head * group + task / tiles * step.heads_together),
                  task % tiles, keys, engine.worker_scratch(worker).Reserve(kGateFloats));
    });
  }
}

ListedGroups ListGroups(const ChosenGroups& of, const ShardLayout& layout, int heads) {
  const int64_t tiles = TileCount(layout.local_tokens(), of.tile),
                rows = heads / of.heads_together * tiles;
  std::vector<std::vector<int32_t>> of_rows(rows);
  ListedGroups listed;
  listed.bounds.resize((layout.ranks + 1) * rows);
  int32_t most = 1;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t tile = row % tiles, first = layout.Position(tile * of.tile);
    const uint32_t* const chosen = of.chosen + row / tiles * of.rows[tiles] + of.rows[tile];
    ShardLayout owner = layout;
    for (owner.rank = 0; owner.rank < owner.ranks; ++owner.rank) {
      for (int64_t key = 0; key < owner.local_tokens() && owner.Position(key) < first;
           key += kGroupKeys) {
        const int64_t group = owner.Position(key) / kGroupKeys;
        if ((chosen[group / 32] >> group % 32 & 1) == 0) continue;
        of_rows[row].push_back(static_cast<int32_t>(key / kGroupKeys));
      }
      listed.bounds[(owner.rank + 1) * rows + row] = static_cast<int32_t>(of_rows[row].size());
    }
    most = std::max(most, static_cast<int32_t>(of_rows[row].size()));
  }
  listed.groups.resize(rows * most);
  for (int64_t row = 0; row < rows; ++row) {
    std::ranges::copy(of_rows[row], listed.groups.begin() + row * most);
  }
  listed.lists = {listed.groups.data(), listed.bounds.data(), rows, most, of.heads_together};
  return listed;
}

}  // namespace ringleader::kernels::reference
