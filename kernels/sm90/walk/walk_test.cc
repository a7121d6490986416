// Which pairs of queries and keys the Hopper kernels compute, without a GPU: walks, descriptions of
// tiles and masks on an emulated warp against the definition of the patterns.
#include "kernels/sm90/testing/emulated_warp.h"
// The warp comes first.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/reference/testing/packed_documents.h"
#include "kernels/sm90/backward/attention_backward_tiles.cuh"
#include "kernels/sm90/forward/attention_forward_masks.cuh"
#include "kernels/sm90/walk/list_parts.cuh"
#include "kernels/sm90/walk/mask_memory.cuh"

namespace ringleader::kernels::sm90 {
namespace {

struct Case {
  std::string name;
  TilePattern pattern = TilePattern::kCausal;
  int tile = 64;
  bool documents = false;
  bool chosen = false;     // kCsr: queries chose blocks
  bool intervals = false;  // kFull, kCsr: of keys, for each query
  LayoutKind layout = LayoutKind::kContiguous;
  int ranks = 1;
  int64_t tokens = 0;
};

class WalkTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Case& c = GetParam();
    RecordProperty("seed", static_cast<int>(seed_));
    queries_ = {.kind = c.layout,
                .ranks = c.ranks,
                .rank = Below(c.ranks),
                .stripe = c.tile,
                .tokens = c.tokens};
    keys_ = queries_;
    keys_.rank = Below(c.ranks);
    walk_.pattern = c.pattern;
    walk_.tile_log2 = c.tile == 64 ? 6 : 7;
    walk_.window = 1 + Below(static_cast<int>(c.tokens / 2));
    walk_.query_tokens = static_cast<int32_t>(queries_.local_tokens());
    walk_.key_tokens = static_cast<int32_t>(keys_.local_tokens());
    walk_.query_tiles = (walk_.query_tokens + c.tile - 1) / c.tile;
    walk_.key_tiles = (walk_.key_tokens + c.tile - 1) / c.tile;
    walk_.query_map = PositionMap::From(queries_);
    walk_.key_map = PositionMap::From(keys_);

    const int64_t blocks = (c.tokens + c.tile - 1) / c.tile;
    walk_.diagonal_words = static_cast<int32_t>((blocks + 63) / 64);
    diagonals_.assign(walk_.diagonal_words, 0);
    for (int64_t delta = 0; delta < blocks; ++delta) {
      if (delta == 0 || Below(3) == 0) diagonals_[delta / 64] |= uint64_t{1} << (delta % 64);
    }
    walk_.diagonals = diagonals_.data();

    listed_.resize(static_cast<size_t>(walk_.query_tiles) * walk_.key_tiles);
    for (size_t i = 0; i < listed_.size(); ++i) listed_[i] = Below(3) == 0;
    row_offsets_ = {0}, column_offsets_ = {0};
    for (int row = 0; row < walk_.query_tiles; ++row) {
      for (int column = 0; column < walk_.key_tiles; ++column) {
        if (Listed(row, column)) columns_.push_back(column);
      }
      row_offsets_.push_back(static_cast<int32_t>(columns_.size()));
    }
    for (int column = 0; column < walk_.key_tiles; ++column) {
      for (int row = 0; row < walk_.query_tiles; ++row) {
        if (Listed(row, column)) rows_.push_back(row);
      }
      column_offsets_.push_back(static_cast<int32_t>(rows_.size()));
    }

    if (c.intervals) MakeIntervals();
    if (c.chosen) {
      const int64_t sequence_blocks =
          (c.tokens + kChosenTiles * c.tile - 1) / (kChosenTiles * c.tile);
      for (int64_t i = 0; i < sequence_blocks * QueryWords(walk_.query_tokens); ++i) {
        const int draw = Below(8);
        chosen_.push_back(draw == 0 ? 0 : draw < 3 ? ~0u : random_());
      }
      walk_.SetChoice({chosen_.data(), static_cast<int32_t>(kChosenTiles * c.tile)}, c.tokens);
    }

    if (!c.documents) return;
    starts_ = reference::testing::DocumentStarts(
        c.tokens, reference::testing::RandomDocuments(c.tokens, c.tile, random_));
    local_starts_ = reference::testing::ShardStarts(starts_, queries_);
    walk_.document_starts = local_starts_.data();
  }

  // Queries of a tile mostly see alike, as in a mask; some see any two intervals, some nothing.
  void MakeIntervals() {
    const int tokens = static_cast<int>(GetParam().tokens);
    KeyIntervals alike;
    for (int i = 0; i < walk_.query_tokens; ++i) {
      int bounds[4];
      for (int& bound : bounds) bound = Below(tokens + 1);
      std::ranges::sort(bounds);
      const KeyIntervals any = {bounds[0], bounds[1], bounds[2], bounds[3]};
      const int draw = Below(200);
      if (i % 97 == 0) alike = {bounds[0], bounds[2], bounds[3], bounds[3]};
      intervals_.push_back(draw == 0 ? any : draw == 1 ? KeyIntervals{} : alike);
    }
  }

  // As PrepareMask does.
  void PrepareMask(bool by_column) {
    const MaskMemory at(walk_.query_tokens, walk_.query_tiles, walk_.key_tiles);
    memory_.assign(at.end, {0xABABABABu, 0xABABABABu});
    EmulatedWarp::Run([&] {
      for (int row = 0; row < walk_.query_tiles; ++row) {
        MarkRow(walk_, intervals_.data(), memory_.data(), at, row);
      }
      __syncwarp();
      for (int row = 0; row < LineWords(walk_.query_tiles); ++row) {
        for (int column = 0; column < LineWords(walk_.key_tiles); ++column) {
          TransposeBits(walk_, memory_.data(), at, row, column);
        }
      }
    });
    walk_.SetIntervals(memory_.data(), by_column ? at.by_column : at.by_row,
                       LineWords(by_column ? walk_.query_tiles : walk_.key_tiles));
  }

  int Below(int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(random_); }
  bool Listed(int row, int column) const {
    return listed_[static_cast<size_t>(row) * walk_.key_tiles + column];
  }

  bool Visible(int query, int key) const {
    const Case& c = GetParam();
    const int64_t at = queries_.Position(query), from = keys_.Position(key);
    if (c.intervals) {
      const KeyIntervals& row = intervals_[query];
      return ((row.begin <= from && from < row.end) ||
              (row.second_begin <= from && from < row.second_end)) &&
             (c.pattern == TilePattern::kFull || Listed(query / c.tile, key / c.tile));
    }
    if (c.pattern == TilePattern::kFull) return true;
    if (from > at || (c.documents && from < starts_[at])) return false;
    if (c.pattern == TilePattern::kWindow) return at - from < walk_.window;
    if (c.pattern == TilePattern::kCsr) {
      return Listed(query / c.tile, key / c.tile) && (!c.chosen || Chose(query, from));
    }
    if (c.pattern != TilePattern::kToeplitz) return true;
    const int64_t delta = at / c.tile - from / c.tile;
    return diagonals_[delta / 64] >> (delta % 64) & 1;
  }

  // Whether some pair of a tile is visible, and whether all are.
  bool TileSees(int row, int column, bool all) const {
    const int tile = GetParam().tile;
    for (int i = row * tile; i < std::min((row + 1) * tile, walk_.query_tokens); ++i) {
      for (int j = column * tile; j < std::min((column + 1) * tile, walk_.key_tokens); ++j) {
        if (Visible(i, j) != all) return !all;
      }
    }
    return all;
  }

  // Whether `query` chose the block of the key at `position`.
  bool Chose(int query, int64_t position) const {
    const int64_t row = position / (kChosenTiles * GetParam().tile);
    return chosen_[row * QueryWords(walk_.query_tokens) + query / 32] >> (query % 32) & 1;
  }

  void Count(int64_t query, int64_t key) {
    if (query >= walk_.query_tokens) return;  // a row that nobody reads
    ASSERT_GE(key, 0);
    ASSERT_LT(key, walk_.key_tokens);
    ++counts_[query * walk_.key_tokens + key];
  }
  void ExpectEveryVisiblePairOnce() const {
    for (int query = 0; query < walk_.query_tokens; ++query) {
      for (int key = 0; key < walk_.key_tokens; ++key) {
        ASSERT_EQ(counts_[static_cast<size_t>(query) * walk_.key_tokens + key], Visible(query, key))
            << "query " << query << ", key " << key;
      }
    }
  }
  void Clear() { counts_.assign(static_cast<size_t>(walk_.query_tokens) * walk_.key_tokens, 0); }

  template <WalkKind kKind, bool kDocuments>
  void Forward(int32_t parts = 1);
  template <WalkKind kKind, bool kDocuments>
  void Backward(int32_t parts = 1);
  template <bool kDocuments>
  void All();

  static constexpr int64_t kChosenTiles = 2;  // of a block

  const unsigned seed_ = std::random_device{}();
  std::mt19937 random_{seed_};
  ShardLayout queries_, keys_;
  TileWalk walk_;
  std::vector<uint64_t> diagonals_;
  std::vector<uint32_t> chosen_;  // QueryChoice's, of head 0
  std::vector<bool> listed_;
  std::vector<int32_t> row_offsets_, columns_, column_offsets_, rows_;
  std::vector<int32_t> starts_, local_starts_;
  std::vector<KeyIntervals> intervals_;
  std::vector<LineBits> memory_;
  std::vector<int> counts_;
};

// Lists in parts, as SplitLists has them.
template <WalkDirection kDirection>
std::vector<int32_t> Split(const TileWalk& walk, int32_t parts) {
  const int32_t lines = LinesOf<kDirection>(walk);
  std::vector<int32_t> begins(static_cast<size_t>(parts + 1) * lines);
  for (int32_t line = 0; line < lines; ++line) {
    for (int32_t part = 0; part < parts; ++part) {
      const auto [begin, end] =
          PartOfList<kDirection>(walk, {.most = parts, .fewest_tiles = 1}, 0, line, part);
      begins[part * lines + line] = begin;
      begins[(part + 1) * lines + line] = end;
    }
  }
  return begins;
}

// As many parts as lists have tiles in the mean, the last of `parts`, each of as many `others`.
void ExpectTilesInTheirParts(const std::vector<int32_t>& offsets, int32_t others, int32_t parts,
                             const std::vector<std::pair<int32_t, int32_t>>& parts_and_tiles) {
  if (parts == 1) return;
  const int32_t mean =
      (offsets.back() - offsets.front()) / static_cast<int32_t>(offsets.size() - 1);
  const int32_t count = std::clamp(mean, 1, parts), tiles = (others + count - 1) / count;
  for (const auto& [part, tile] : parts_and_tiles) {
    ASSERT_EQ(part, parts - count + tile / tiles) << "tile " << tile;
  }
}

// Walks as ProduceStages and the consumers of forward do, one part of the keys after the other.
template <WalkKind kKind, bool kDocuments>
void WalkTest::Forward(int32_t parts) {
  using Tile = ForwardTile<128, kKind>;
  struct Stage {
    int32_t block;
    int32_t tiles[2];
    StepOf<kKind> step;
    bool last;
  };
  std::vector<Stage> stages;
  walk_.list_offsets = row_offsets_.data();
  walk_.list_head = walk_.query_tiles + 1;
  walk_.list = columns_.data();
  if (kHasIntervals<kKind>) PrepareMask(/*by_column=*/false);
  StepOf<kKind> step;
  TileWalk walk = walk_;
  std::vector<int32_t> split;
  if (parts > 1) {
    split = Split<WalkDirection::kAlongRow>(walk_, parts);
    walk.list_end = walk.query_tiles;
  }
  std::vector<std::pair<int32_t, int32_t>> parts_and_tiles;
  const auto walk_part = [&](int32_t part) {
    if (parts > 1) walk.list_offsets = split.data() + part * walk.query_tiles;
    const int32_t blocks = (walk.query_tokens + Tile::kQueries - 1) / Tile::kQueries;
    for (int32_t block = 0; block < blocks; ++block) {
      ForwardTiles<kKind, kDocuments> tiles(walk, {}, {.head = 0, .block = block});
      auto tile = tiles.Next();
      // The loop ends after one more than there can be.
      for (int i = 0; tile.index >= 0 && i <= walk_.key_tiles; ++i) {
        const auto following = tiles.Next();
        tiles.Describe(step, tile, following.index < 0);
        __syncwarp();
        if (threadIdx.x == 0) {
          Stage stage = {block, {tile.index, tile.index}, step, following.index < 0};
          if constexpr (kKind == WalkKind::kTiles64) stage.tiles[1] = tile.second;
          stages.push_back(stage);
          parts_and_tiles.emplace_back(part, tile.index);
        }
        __syncwarp();
        tile = following;
      }
    }
  };
  for (int32_t part = 0; part < parts; ++part) EmulatedWarp::Run([&] { walk_part(part); });
  Clear();
  for (const Stage& stage : stages) {
    ASSERT_EQ(stage.step.all.last, stage.last);
    if (kHasIntervals<kKind>) {
      ASSERT_TRUE(TileSees(stage.block, stage.tiles[0], false));
      const bool whole = (stage.tiles[0] + 1) * Tile::kKeys <= walk_.key_tokens;
      ASSERT_EQ(stage.step.all.masked, !whole || !TileSees(stage.block, stage.tiles[0], true));
    }
    for (int i = 0; i < Tile::kConsumers * 128; ++i) {
      threadIdx.x = i;
      const int consumer = i / 128;
      float scores[Tile::kKeys / 2] = {};
      if (stage.step.all.masked) MaskStage<kKind, kDocuments>(scores, walk_, stage.step, consumer);
      for (int j = 0; j < Tile::kKeys / 2; ++j) {
        if (std::isinf(scores[j])) continue;
        const int row = consumer * 64 + FragmentRow() + j / 2 % 2 * 8;
        const int column = j / 4 * 8 + 2 * (i % 4) + j % 2;
        const int64_t key = kKind == WalkKind::kTiles64
                                ? int64_t{stage.tiles[column / 64]} * 64 + column % 64
                                : int64_t{stage.tiles[0]} * Tile::kKeys + column;
        ASSERT_NO_FATAL_FAILURE(Count(int64_t{stage.block} * Tile::kQueries + row, key));
      }
    }
  }
  ExpectEveryVisiblePairOnce();
  ExpectTilesInTheirParts(row_offsets_, walk_.key_tiles, parts, parts_and_tiles);
}

// Walks as BackwardProduce does, with masks by the definition of TileStep.
template <WalkKind kKind, bool kDocuments>
void WalkTest::Backward(int32_t parts) {
  struct Stage {
    int32_t key_block;
    KeyStepOf<kKind> step;
    int32_t tile;
    int32_t first_query;
    bool last;
  };
  std::vector<Stage> stages;
  walk_.list_offsets = column_offsets_.data();
  walk_.list_head = walk_.key_tiles + 1;
  walk_.list = rows_.data();
  if (kHasIntervals<kKind>) PrepareMask(/*by_column=*/true);
  BackwardParams params;
  params.walk = walk_;
  KeyStepOf<kKind> step;
  params.heads = params.kv_heads = params.heads_per_item = 1;
  // The items are gone through with the empty ones.
  std::vector<int32_t> split;
  if (parts > 1) {
    split = Split<WalkDirection::kAlongColumn>(walk_, parts);
    params.list_parts = parts;
    params.walk.list_offsets = split.data();
    params.walk.list_part = params.walk.list_end = walk_.key_tiles;
  }
  std::vector<std::pair<int32_t, int32_t>> parts_and_tiles;
  EmulatedWarp::Run([&] {
    for (int32_t index = 0;; ++index) {
      const BackwardItem item = BackwardItemAt<kKind>(params, index);
      if (item.kv_head < 0) break;
      const int32_t block = item.key_block;
      BackwardTiles<kKind, kDocuments> tiles(params, 0, item);
      TileRef tile = tiles.Next();
      while (tile.index >= 0) {
        const TileRef following = tiles.Next();
        for (int32_t offset = 0; offset < walk_.tile(); offset += kBackwardQueries) {
          const int32_t first_query = tile.index * walk_.tile() + offset;
          if (first_query >= walk_.query_tokens) break;
          const bool last =
              following.index < 0 && (offset + kBackwardQueries >= walk_.tile() ||
                                      first_query + kBackwardQueries >= walk_.query_tokens);
          tiles.Describe(step, walk_, 0, tile, offset, last);
          __syncwarp();
          if (threadIdx.x == 0) {
            stages.push_back({block, step, tile.index, first_query, last});
            parts_and_tiles.emplace_back(item.part, tile.index);
          }
          __syncwarp();
        }
        tile = following;
      }
    }
  });
  Clear();
  constexpr bool kTiles64 = kKind == WalkKind::kTiles64 || kHasLists64<kKind>;
  for (const Stage& stage : stages) {
    for (int part = 0; kHasIntervals<kKind> && part < (kTiles64 ? 2 : 1); ++part) {
      const int column = stage.key_block * (kTiles64 ? 2 : 1) + part;
      ASSERT_EQ(stage.step.part[part].keys > 0,
                column < walk_.key_tiles && TileSees(stage.tile, column, false));
    }
    for (int i = 0; i < kBackwardKeys * kBackwardQueries; ++i) {
      const int key = i / kBackwardQueries, query = i % kBackwardQueries;
      const TileStep& part = stage.step.part[kTiles64 ? key / 64 : 0];
      ASSERT_EQ(part.last, stage.last);
      const int64_t whole_key = int64_t{stage.key_block} * kBackwardKeys + key;
      const int64_t whole_query = int64_t{stage.first_query} + query;
      if (whole_query >= walk_.query_tokens) continue;
      if (part.keys == 0) continue;
      if constexpr (kHasIntervals<kKind>) {
        if (part.masked) {
          int before = 0;
          for (int bound = 0; bound < 4; ++bound) {
            before += Bound(stage.step.bounds[query], bound) <= key;
          }
          if (before % 2 == 0) continue;
        }
      } else if (part.masked) {
        const int64_t in_part = kTiles64 ? key % 64 : key, distance = in_part - query;
        if (in_part >= part.keys || distance > part.diagonal ||
            distance <= int64_t{part.diagonal} - part.window) {
          continue;
        }
        if (kDocuments && keys_.Position(whole_key) < local_starts_[whole_query]) continue;
        const uint32_t* const bits = stage.step.visible + (kTiles64 ? key / 64 * 2 : 0);
        if (kHasChoice<kKind> && !(bits[query / 32] >> (query % 32) & 1)) continue;
      }
      ASSERT_NO_FATAL_FAILURE(Count(whole_query, whole_key));
    }
  }
  ExpectEveryVisiblePairOnce();
  ExpectTilesInTheirParts(column_offsets_, walk_.query_tiles, parts, parts_and_tiles);
}

template <bool kDocuments>
void WalkTest::All() {
  const auto both = [&]<WalkKind kKind>() {
    SCOPED_TRACE(absl::StrFormat("kind %d", kKind));
    {
      SCOPED_TRACE("forward");
      ASSERT_NO_FATAL_FAILURE((Forward<kKind, kDocuments>()));
    }
    SCOPED_TRACE("backward");
    ASSERT_NO_FATAL_FAILURE((Backward<kKind, kDocuments>()));
    if (GetParam().pattern != TilePattern::kCsr) return;
    SCOPED_TRACE("in parts");
    ASSERT_NO_FATAL_FAILURE((Forward<kKind, kDocuments>(3)));
    ASSERT_NO_FATAL_FAILURE((Backward<kKind, kDocuments>(3)));
  };
  if constexpr (!kDocuments) {
    if (GetParam().intervals) {
      GetParam().tile == 128 ? both.template operator()<WalkKind::kIntervals128>()
                             : both.template operator()<WalkKind::kIntervals64>();
      return;
    }
  }
  if (GetParam().chosen) {
    GetParam().tile == 128 ? both.template operator()<WalkKind::kChosen128>()
                           : both.template operator()<WalkKind::kChosen64>();
  } else if (GetParam().tile == 128) {
    both.template operator()<WalkKind::kTiles128>();
  } else if (GetParam().pattern == TilePattern::kCsr) {
    both.template operator()<WalkKind::kLists64>();
  } else {
    both.template operator()<WalkKind::kTiles64>();
    // Walks of forward alone; lists' takes every pattern.
    ASSERT_NO_FATAL_FAILURE((Forward<WalkKind::kLists64, kDocuments>()));
    if (GetParam().pattern == TilePattern::kToeplitz) {
      SCOPED_TRACE("diagonals");
      ASSERT_NO_FATAL_FAILURE((Forward<WalkKind::kDiagonals64, kDocuments>()));
    }
  }
}

TEST_P(WalkTest, VisitsEveryVisiblePairOnce) {
  GetParam().documents ? All<true>() : All<false>();
}

std::vector<Case> Cases() {
  const std::pair<const char*, TilePattern> patterns[] = {
      {"Full", TilePattern::kFull},      {"Causal", TilePattern::kCausal},
      {"Window", TilePattern::kWindow},  {"Toeplitz", TilePattern::kToeplitz},
      {"Csr", TilePattern::kCsr},        {"Chosen", TilePattern::kCsr},
      {"Intervals", TilePattern::kFull}, {"ListedIntervals", TilePattern::kCsr}};
  std::vector<Case> cases;
  for (const auto& [name, pattern] : patterns) {
    const bool chosen = std::string(name) == "Chosen";
    const bool intervals = std::string(name).ends_with("Intervals");
    for (const int tile : {64, 128}) {
      for (const bool documents : {false, true}) {
        if (documents && (pattern == TilePattern::kFull || intervals)) continue;
        const auto add = [&, name = name, pattern = pattern, chosen, intervals](
                             const char* what, LayoutKind layout, int ranks, int64_t tokens) {
          cases.push_back(
              {.name = absl::StrFormat("%s%d%s%s", name, tile, what, documents ? "Documents" : ""),
               .pattern = pattern,
               .tile = tile,
               .documents = documents,
               .chosen = chosen,
               .intervals = intervals,
               .layout = layout,
               .ranks = ranks,
               .tokens = tokens});
        };
        add("Short", LayoutKind::kContiguous, 1, 65);
        add("Ragged", LayoutKind::kContiguous, 1, 1500);
        add("Zigzag", LayoutKind::kZigzag, 2, 1024);
        add("Striped", LayoutKind::kStriped, 2, 1024);
        if (!intervals) continue;
        add("Long", LayoutKind::kContiguous, 1, 3000);  // more than a word of tiles
        add("Contiguous", LayoutKind::kContiguous, 2, 1200);
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Walks, WalkTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ringleader::kernels::sm90
