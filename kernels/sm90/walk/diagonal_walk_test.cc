// Which tiles DiagonalWalker finds in long sequences, without a GPU: on an emulated warp against
// the definition of block diagonals. (walk_test.cc counts pairs, in short ones.)
#include "kernels/sm90/testing/emulated_warp.h"
// The warp comes first.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/testing/packed_documents.h"
#include "kernels/sm90/walk/diagonal_walk.cuh"

namespace ringleader::kernels::sm90 {
namespace {

constexpr int64_t kTile = 64;

struct Case {
  std::string name;
  LayoutKind layout = LayoutKind::kContiguous;
  int ranks = 1;
  int blocks = 0;  // whole ones
  int stripe_blocks = 1;
  int64_t more_tokens = 0;

  int64_t tokens() const { return blocks * kTile + more_tokens; }
};

class DiagonalWalkTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Case& c = GetParam();
    RecordProperty("seed", static_cast<int>(seed_));
    queries_ = {.kind = c.layout,
                .ranks = c.ranks,
                .stripe = static_cast<int32_t>(c.stripe_blocks * kTile),
                .tokens = c.tokens()};
    keys_ = queries_;
    walk_.pattern = TilePattern::kToeplitz;
    walk_.tile_log2 = 6;
    walk_.query_tokens = walk_.key_tokens = static_cast<int32_t>(queries_.local_tokens());
    walk_.query_tiles = walk_.key_tiles =
        static_cast<int32_t>((queries_.local_tokens() + kTile - 1) / kTile);
    blocks_ = (c.tokens() + kTile - 1) / kTile;
    walk_.diagonal_words = static_cast<int32_t>((blocks_ + 63) / 64);
  }

  int64_t Below(int64_t bound) {
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(random_);
  }

  // Heads 0 to 3: the main diagonal alone, every twentieth, a random third, all.
  static constexpr int kHeads = 4;
  void SetDiagonals() {
    diagonals_.assign(static_cast<size_t>(kHeads) * walk_.diagonal_words, 0);
    for (int head = 0; head < kHeads; ++head) {
      uint64_t* const words = diagonals_.data() + int64_t{head} * walk_.diagonal_words;
      for (int64_t delta = 0; delta < blocks_; ++delta) {
        const bool set[kHeads] = {false, delta % 20 == 0, Below(3) == 0, true};
        if (delta == 0 || set[head]) words[delta / 64] |= uint64_t{1} << (delta % 64);
      }
    }
    walk_.diagonals = diagonals_.data();
  }
  void SetRanks() {
    queries_.rank = static_cast<int32_t>(Below(GetParam().ranks));
    keys_.rank = static_cast<int32_t>(Below(GetParam().ranks));
    walk_.query_map = PositionMap::From(queries_);
    walk_.key_map = PositionMap::From(keys_);
  }
  // A few long ones.
  void SetDocuments() {
    std::vector<int64_t> firsts = {0};
    for (int i = 0; i < 3; ++i) firsts.push_back(1 + Below(GetParam().tokens() - 1));
    std::sort(firsts.begin(), firsts.end());
    firsts.erase(std::unique(firsts.begin(), firsts.end()), firsts.end());
    starts_ = reference::testing::ShardStarts(
        reference::testing::DocumentStarts(GetParam().tokens(), firsts), queries_);
    walk_.document_starts = starts_.data();
  }

  std::vector<int32_t> Expected(int head, int32_t row, bool documents) const {
    std::vector<int32_t> columns;
    const int64_t query_block = queries_.Position(row * kTile) / kTile;
    for (int32_t column = 0; column < walk_.key_tiles; ++column) {
      const int64_t key_block = keys_.Position(column * kTile) / kTile;
      const int64_t delta = query_block - key_block;
      if (delta < 0) continue;
      // The document of the tile's first query starts after the tile's last key.
      if (documents && starts_[row * kTile] >= (key_block + 1) * kTile) continue;
      if (diagonals_[int64_t{head} * walk_.diagonal_words + delta / 64] >> (delta % 64) & 1)
        columns.push_back(column);
    }
    return columns;
  }

  template <bool kDocuments>
  void ExpectTilesOfRows() {
    std::vector<int32_t> rows = {0, walk_.query_tiles - 1};
    for (int i = 0; i < 3; ++i) rows.push_back(static_cast<int32_t>(Below(walk_.query_tiles)));
    for (int head = 0; head < kHeads; ++head) {
      for (const int32_t row : rows) {
        std::vector<int32_t> found;
        EmulatedWarp::Run([&] {
          DiagonalWalker<kDocuments> walker(walk_, head, row);
          for (int i = 0; i <= walk_.key_tiles; ++i) {  // one more than there can be
            const int32_t tile = walker.Next();
            if (tile < 0) break;
            if (threadIdx.x == 0) found.push_back(tile);
          }
        });
        ASSERT_EQ(found, Expected(head, row, kDocuments))
            << "head " << head << ", row " << row << " of rank " << queries_.rank << ", keys of "
            << keys_.rank;
      }
    }
  }

  const unsigned seed_ = std::random_device{}();
  std::mt19937 random_{seed_};
  ShardLayout queries_, keys_;
  TileWalk walk_;
  int64_t blocks_ = 0;
  std::vector<uint64_t> diagonals_;
  std::vector<int32_t> starts_;
};

TEST_P(DiagonalWalkTest, FindsEveryActiveTileOnceInOrder) {
  SetDiagonals();
  for (int step = 0; step < 3; ++step) {  // of the ring
    SetRanks();
    ASSERT_NO_FATAL_FAILURE(ExpectTilesOfRows<false>());
    SetDocuments();
    ASSERT_NO_FATAL_FAILURE(ExpectTilesOfRows<true>());
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, DiagonalWalkTest,
    ::testing::Values(Case{"OneRank", LayoutKind::kContiguous, 1, 700},
                      Case{.name = "Ragged", .blocks = 300, .more_tokens = 17},
                      Case{"Contiguous", LayoutKind::kContiguous, 3, 3 * 150},
                      Case{"Zigzag", LayoutKind::kZigzag, 3, 6 * 77},
                      Case{"ZigzagOfSmallChunks", LayoutKind::kZigzag, 2, 4 * 5},
                      Case{"StripesOfOne", LayoutKind::kStriped, 4, 4 * 200, 1},
                      Case{"StripesOfThree", LayoutKind::kStriped, 3, 3 * 3 * 60, 3},
                      Case{"StripesOf32", LayoutKind::kStriped, 2, 2 * 32 * 6, 32},
                      Case{"StripesOf45", LayoutKind::kStriped, 5, 5 * 45 * 5, 45}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ringleader::kernels::sm90
