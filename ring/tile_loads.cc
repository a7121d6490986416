#include "ring/tile_loads.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <utility>

#include "base/numbers/ceil_div.h"

namespace ringleader::ring {
namespace {

using kernels::LayoutKind;
using kernels::ShardLayout;

// The same layout with blocks in place of tokens.
ShardLayout InBlocks(const ShardLayout& layout, int tile) {
  return {.kind = layout.kind,
          .ranks = layout.ranks,
          .stripe = layout.stripe / tile,
          .tokens = CeilDiv(layout.tokens, tile)};
}

// Blocks of a run that lies on one rank.
int64_t ChunkOf(const ShardLayout& blocks) {
  if (blocks.ranks == 1) return blocks.tokens;
  switch (blocks.kind) {
    case LayoutKind::kContiguous:
      return blocks.local_tokens();
    case LayoutKind::kZigzag:
      return blocks.tokens / blocks.chunks();
    case LayoutKind::kStriped:
      return blocks.stripe;
  }
  std::abort();  // a layout that no enumerator names
}

// w[x]: tiles that one chunk visits in the chunk x before it, or ahead of it. Diagonal delta = x c
// + y has c - y tiles at distance x and y tiles at x + 1. `diagonals`: of [0, blocks), the first
// ones.
template <typename Share>
std::vector<double> ChunkWeights(const std::vector<Share>& diagonals, int64_t blocks,
                                 int64_t chunk) {
  std::vector<double> weights(blocks / chunk + 1, 0.0);
  for (int64_t delta = 0; delta < std::ssize(diagonals); ++delta) {
    if (diagonals[delta] == 0) continue;
    const int64_t x = delta / chunk, y = delta % chunk;
    weights[x] += static_cast<double>(diagonals[delta]) * static_cast<double>(chunk - y);
    weights[x + 1] += static_cast<double>(diagonals[delta]) * static_cast<double>(y);
  }
  weights.pop_back();  // a distance that no two chunks have
  return weights;
}

bool IsBefore(const ListedLoad& a, const ListedLoad& b) {
  return std::pair(a.rank, a.owner) < std::pair(b.rank, b.owner);
}

// [r]: values[r] to values[r + ranks - 1] put together, of 2 ranks - 1 values. All these windows
// hold the middle one, so each is a run that ends there and a run that begins after it.
template <typename Combine>
std::vector<double> OverWindows(const std::vector<double>& values, int ranks, Combine combine) {
  std::vector<double> runs = values;
  for (int i = ranks - 2; i >= 0; --i) runs[i] = combine(runs[i], runs[i + 1]);
  for (int i = ranks + 1; i < 2 * ranks - 1; ++i) runs[i] = combine(runs[i], runs[i - 1]);
  std::vector<double> windows(ranks);
  for (int r = 0; r < ranks; ++r)
    windows[r] = r == 0 ? runs[0] : combine(runs[r], runs[r + ranks - 1]);
  return windows;
}

// max over i of a[i] + b[i]. Eight at a time, which processors do at once.
double LargestSum(const double* a, const double* b, int count) {
  constexpr int kLanes = 8;
  double largest[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double sum = a[i + lane] + b[i + lane];
      largest[lane] = sum > largest[lane] ? sum : largest[lane];
    }
  }
  for (; i < count; ++i) largest[0] = std::max(largest[0], a[i] + b[i]);
  return *std::max_element(largest, largest + kLanes);
}

}  // namespace

// Contiguous: one chunk a rank, so w(rank - owner). Zigzag: chunks r and 2 W - 1 - r; both of a
// rank's chunks meet the owner's chunk of the same kind at |rank - owner|, and its late chunk meets
// the owner's early one at 2 W - 1 - (rank + owner). Striped: rank r meets stripes of owner j at
// distances ρ + W m with ρ = (r - j) mod W, in n - m pairs of stripes where a rank has n, and in
// one pair less if r < j, because the first stripe then has no partner. What lies ahead is the same
// with rank and owner exchanged.
void TileLoads::AddDiagonals(std::span<const double> weights, const ShardLayout& blocks,
                             double weight, int direction) {
  const auto apart = [&](int64_t distance) -> double& {  // by rank - owner
    return apart_[direction * distance + ranks_ - 1];
  };
  const LayoutKind kind = ranks_ == 1 ? LayoutKind::kContiguous : blocks.kind;
  switch (kind) {
    case LayoutKind::kContiguous:
      for (int x = 0; x < ranks_; ++x) apart(x) += weight * weights[x];
      return;
    case LayoutKind::kZigzag:
      for (int x = 0; x < ranks_; ++x) {
        apart(x) += weight * weights[x];
        apart(-x) += weight * weights[x];
      }
      is_mirrored_ = true;
      for (int sum = 0; sum < 2 * ranks_ - 1; ++sum) {
        mirrored_[sum] += weight * weights[2 * ranks_ - 1 - sum];
      }
      return;
    case LayoutKind::kStriped: {
      const auto chunks = static_cast<int64_t>(weights.size());
      for (int64_t x = 0; x < chunks; ++x) {
        const int64_t residue = x % ranks_, pairs = chunks / ranks_ - x / ranks_;
        apart(residue) += weight * weights[x] * static_cast<double>(pairs);
        if (residue == 0) continue;
        apart(residue - ranks_) += weight * weights[x] * static_cast<double>(pairs - 1);
      }
      return;
    }
  }
}

void TileLoads::AddHead(const HeadPattern& head, const ShardLayout& layout, int tile,
                        double weight) {
  const ShardLayout blocks = InBlocks(layout, tile);
  const int64_t chunk = ChunkOf(blocks);
  if (!head.diagonals.empty()) {
    AddDiagonals(ChunkWeights(head.diagonals, blocks.tokens, chunk), blocks, weight, 1);
  }
  if (!head.ahead.empty()) {
    AddDiagonals(ChunkWeights(head.ahead, blocks.tokens, chunk), blocks, weight, -1);
  }
  if (!head.row_offsets.empty()) AddRows(head, blocks, weight);
  if (!head.columns_in_block.empty()) {
    double before = 0;
    for (int64_t q = 0; q < blocks.tokens; ++q) {
      AddColumns(blocks.Owner(q), weight * before / tile);
      before += head.columns_in_block[q];
    }
  }
}

// Rank by rank, so that the sums over a rank's rows take room for one row of owners alone.
void TileLoads::AddRows(const HeadPattern& head, const ShardLayout& blocks, double weight) {
  std::vector<int> owner_of(blocks.tokens);
  for (int64_t k = 0; k < blocks.tokens; ++k) owner_of[k] = blocks.Owner(k);
  std::vector<ListedLoad> added;
  std::vector<double> sums(ranks_);
  std::vector<uint64_t> met((ranks_ + 63) / 64);  // a bit an owner
  ShardLayout mine = blocks;
  for (mine.rank = 0; mine.rank < ranks_; ++mine.rank) {
    for (int64_t i = 0; i < mine.local_tokens(); ++i) {
      const int64_t row = mine.Position(i);
      const double tiles = weight * (head.row_weights.empty() ? 1.0 : head.row_weights[row]);
      for (int64_t k = head.row_offsets[row]; k < head.row_offsets[row + 1]; ++k) {
        const int owner = owner_of[head.columns[k]];
        met[owner / 64] |= uint64_t{1} << owner % 64;
        sums[owner] += tiles;
      }
    }
    for (size_t word = 0; word < met.size(); ++word) {
      for (; met[word] != 0; met[word] &= met[word] - 1) {
        const int owner = static_cast<int>(64 * word) + std::countr_zero(met[word]);
        added.push_back({.rank = mine.rank, .owner = owner, .tiles = sums[owner]});
        sums[owner] = 0;
      }
    }
  }
  if (listed_.empty()) {
    added.shrink_to_fit();
    listed_ = std::move(added);
    return;
  }
  std::vector<ListedLoad> both;
  both.reserve(listed_.size() + added.size());
  std::merge(listed_.begin(), listed_.end(), added.begin(), added.end(), std::back_inserter(both),
             IsBefore);
  listed_.clear();
  for (const ListedLoad& load : both) {
    const bool is_new =
        listed_.empty() || listed_.back().rank != load.rank || listed_.back().owner != load.owner;
    if (is_new) {
      listed_.push_back(load);
    } else {
      listed_.back().tiles += load.tiles;
    }
  }
}

void TileLoads::AddRing(int rank, int owner, double tiles) {
  const ListedLoad added = {.rank = rank, .owner = owner, .tiles = tiles};
  const auto place = std::lower_bound(listed_.begin(), listed_.end(), added, IsBefore);
  if (place != listed_.end() && !IsBefore(added, *place)) {
    place->tiles += tiles;
  } else {
    listed_.insert(place, added);
  }
}

void TileLoads::Scale(double factor) {
  for (std::vector<double>* part : {&apart_, &mirrored_, &column_}) {
    for (double& tiles : *part) tiles *= factor;
  }
  for (ListedLoad& load : listed_) load.tiles *= factor;
}

double TileLoads::of(int rank, int owner) const {
  const ListedLoad pair = {.rank = rank, .owner = owner};
  const auto place = std::lower_bound(listed_.begin(), listed_.end(), pair, IsBefore);
  const bool is_listed = place != listed_.end() && !IsBefore(pair, *place);
  return apart(rank - owner) + mirrored_[rank + owner] + (is_listed ? place->tiles : 0);
}

std::vector<double> TileLoads::RingTotals() const {
  std::vector<double> totals = OverWindows(apart_, ranks_, std::plus<>());
  const std::vector<double> mirrored = OverWindows(mirrored_, ranks_, std::plus<>());
  for (int rank = 0; rank < ranks_; ++rank) totals[rank] += mirrored[rank];
  for (const ListedLoad& load : listed_) totals[load.rank] += load.tiles;
  return totals;
}

std::vector<double> TileLoads::RankTotals() const {
  std::vector<double> totals = RingTotals();
  for (int rank = 0; rank < ranks_; ++rank) totals[rank] += column_[rank];
  return totals;
}

std::vector<double> TileLoads::LargestSteps() const {
  std::vector<double> largest;
  if (!is_mirrored_) {
    largest = OverWindows(apart_, ranks_, [](double a, double b) { return std::max(a, b); });
  } else {
    // Both parts ascend with the owner: one in its sum with the rank, one against their difference.
    const std::vector<double> turned(apart_.rbegin(), apart_.rend());
    for (int rank = 0; rank < ranks_; ++rank) {
      largest.push_back(LargestSum(&turned[ranks_ - 1 - rank], &mirrored_[rank], ranks_));
    }
  }
  for (const ListedLoad& load : listed_) {
    double& most = largest[load.rank];
    most = std::max(most,
                    apart(load.rank - load.owner) + mirrored_[load.rank + load.owner] + load.tiles);
  }
  return largest;
}

double TileLoads::StepImbalance() const {
  const std::vector<double> totals = RingTotals(), largest = LargestSteps();
  double sum = 0;
  int counted = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (totals[rank] <= 0) continue;
    sum += largest[rank] * ranks_ / totals[rank];
    ++counted;
  }
  return counted > 0 ? sum / counted : 1.0;
}

}  // namespace ringleader::ring
