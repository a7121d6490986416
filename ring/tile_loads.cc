#include "ring/tile_loads.h"

#include <cstdlib>

namespace ringleader::ring {
namespace {

using kernels::LayoutKind;
using kernels::ShardLayout;

// The same layout with blocks in place of tokens.
ShardLayout InBlocks(const ShardLayout& layout, int tile) {
  return {.kind = layout.kind,
          .ranks = layout.ranks,
          .stripe = layout.stripe / tile,
          .tokens = (layout.tokens + tile - 1) / tile};
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

// w[x]: tiles that one chunk visits in the chunk x before it. Diagonal delta = x c + y has c - y
// tiles at distance x and y tiles at x + 1.
std::vector<double> ChunkWeights(const std::vector<uint8_t>& diagonals, int64_t chunk) {
  const auto blocks = static_cast<int64_t>(diagonals.size());
  std::vector<double> weights(blocks / chunk + 1, 0.0);
  for (int64_t delta = 0; delta < blocks; ++delta) {
    if (!diagonals[delta]) continue;
    const int64_t x = delta / chunk, y = delta % chunk;
    weights[x] += static_cast<double>(chunk - y);
    weights[x + 1] += static_cast<double>(y);
  }
  weights.pop_back();  // a distance that no two chunks have
  return weights;
}

}  // namespace

// Contiguous: one chunk a rank, so w(rank - owner). Zigzag: chunks r and 2 W - 1 - r; both of a
// rank's chunks meet the owner's chunk of the same kind at |rank - owner|, and its late chunk meets
// the owner's early one at 2 W - 1 - (rank + owner). Striped: rank r meets stripes of owner j at
// distances ρ + W m with ρ = (r - j) mod W, in n - m pairs of stripes where a rank has n, and in
// one pair less if r < j, because the first stripe then has no partner.
void TileLoads::AddDiagonals(const std::vector<uint8_t>& diagonals, const ShardLayout& blocks,
                             double weight) {
  const std::vector<double> weights = ChunkWeights(diagonals, ChunkOf(blocks));
  double* const apart = &apart_[ranks_ - 1];  // by rank - owner
  const LayoutKind kind = ranks_ == 1 ? LayoutKind::kContiguous : blocks.kind;
  switch (kind) {
    case LayoutKind::kContiguous:
      for (int x = 0; x < ranks_; ++x) apart[x] += weight * weights[x];
      return;
    case LayoutKind::kZigzag:
      for (int x = 0; x < ranks_; ++x) {
        apart[x] += weight * weights[x];
        apart[-x] += weight * weights[x];
      }
      for (int sum = 0; sum < 2 * ranks_ - 1; ++sum) {
        mirrored_[sum] += weight * weights[2 * ranks_ - 1 - sum];
      }
      return;
    case LayoutKind::kStriped: {
      const auto chunks = static_cast<int64_t>(weights.size());
      for (int64_t x = 0; x < chunks; ++x) {
        const int64_t residue = x % ranks_, pairs = chunks / ranks_ - x / ranks_;
        apart[residue] += weight * weights[x] * static_cast<double>(pairs);
        if (residue == 0) continue;
        apart[residue - ranks_] += weight * weights[x] * static_cast<double>(pairs - 1);
      }
      return;
    }
  }
}

void TileLoads::AddHead(const HeadPattern& head, const ShardLayout& layout, int tile,
                        double weight) {
  const ShardLayout blocks = InBlocks(layout, tile);
  if (!head.diagonals.empty()) AddDiagonals(head.diagonals, blocks, weight);
  if (!head.row_offsets.empty()) {
    for (int64_t q = 0; q < blocks.tokens; ++q) {
      const int rank = blocks.Owner(q);
      for (int64_t k = head.row_offsets[q]; k < head.row_offsets[q + 1]; ++k) {
        AddRing(rank, blocks.Owner(head.columns[k]), weight);
      }
    }
  }
  if (!head.columns_in_block.empty()) {
    double before = 0;
    for (int64_t q = 0; q < blocks.tokens; ++q) {
      AddColumns(blocks.Owner(q), weight * before / tile);
      before += head.columns_in_block[q];
    }
  }
}

void TileLoads::AddRing(int rank, int owner, double tiles) {
  if (listed_.empty()) listed_.resize(size_t(ranks_) * ranks_);
  listed_[size_t(rank) * ranks_ + owner] += tiles;
}

void TileLoads::Scale(double factor) {
  for (std::vector<double>* part : {&apart_, &mirrored_, &listed_, &column_}) {
    for (double& tiles : *part) tiles *= factor;
  }
}

std::vector<double> TileLoads::RankTotals() const {
  std::vector<double> totals = column_;
  for (int rank = 0; rank < ranks_; ++rank) {
    for (int owner = 0; owner < ranks_; ++owner) totals[rank] += of(rank, owner);
  }
  return totals;
}

}  // namespace ringleader::ring
