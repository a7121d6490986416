// How many attention tiles each rank visits of each owner's keys, counted from the pattern: exactly
// what the kernels will visit, without a tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ringleader/kernels/shard_layout.h"

namespace ringleader::ring {

// What one head visits, in blocks of one tile's edge. Causal: key block <= query block.
struct HeadPattern {
  // Block diagonals: query block A attends to key block A - delta where diagonals[delta] is set.
  std::vector<uint8_t> diagonals;  // [blocks], or empty
  // Key blocks by query block, for patterns that are no diagonals.
  std::vector<int64_t> row_offsets;  // [blocks + 1], or empty
  std::vector<int32_t> columns;
  // Selected single columns in each key block; all later query blocks attend to them.
  std::vector<double> columns_in_block;  // [blocks], or empty
};

// How blocks are dealt to ranks: runs of `chunk_blocks` blocks.
struct Dealing {
  kernels::LayoutKind kind = kernels::LayoutKind::kContiguous;
  int ranks = 1;
  int64_t blocks = 0;
  int64_t stripe_blocks = 1;  // striped only

  int64_t chunk_blocks() const;
  int Owner(int64_t chunk) const;
};

// Sums over heads. Tiles outside the ring (selected columns) count as dense tiles.
struct TileLoads {
  explicit TileLoads(int ranks_) : ranks(ranks_), ring(size_t(ranks_) * ranks_), column(ranks_) {}

  double of(int rank, int owner) const { return ring[size_t(rank) * ranks + owner]; }
  double total() const;
  // Rank's tiles over all owners and columns.
  double rank_total(int rank) const;
  double worker_imbalance() const;  // max/mean over ranks of rank_total
  void Scale(double factor);

  int ranks;
  std::vector<double> ring;    // [rank][owner]
  std::vector<double> column;  // [rank]
};

// Adds `weight` × the head. `tile`: tokens in a block.
//
// Diagonals in a striped layout follow the closed form of a Toeplitz matrix: with ρ = (r - j) mod W
// rank r visits Σ_m w(ρ + W m) max(0, n - m - [r < j]) tiles of owner j, where w(x) counts the
// tiles between two stripes x apart and n is the stripes per rank (one block a stripe: w =
// diagonals).
void AddHead(const HeadPattern& head, const Dealing& dealing, int tile, double weight,
             TileLoads* loads);

}  // namespace ringleader::ring
