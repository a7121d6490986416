// How many attention tiles each rank visits of each owner's keys, counted from the pattern: exactly
// what the kernels will visit, without a tensor. A ring step's load is that of the owner whose keys
// the step attends to (ring_schedule.h).
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

// Sums over heads. Tiles outside the ring (selected columns) count as dense tiles.
class TileLoads {
 public:
  explicit TileLoads(int ranks)
      : ranks_(ranks), apart_(2 * ranks - 1), mirrored_(2 * ranks - 1), column_(ranks) {}

  // Adds `weight` × the head. `layout`: of the whole sequence, in chunks of whole tiles; its rank
  // is ignored. `tile`: tokens of a block.
  void AddHead(const HeadPattern& head, const kernels::ShardLayout& layout, int tile,
               double weight);
  // Adds to what `rank` visits of `owner`'s keys, or of all owners' selected columns.
  void AddRing(int rank, int owner, double tiles);
  void AddColumns(int rank, double tiles) { column_[rank] += tiles; }
  void Scale(double factor);

  int ranks() const { return ranks_; }
  double of(int rank, int owner) const {
    const double tiles = apart_[rank - owner + ranks_ - 1] + mirrored_[rank + owner];
    return listed_.empty() ? tiles : tiles + listed_[size_t(rank) * ranks_ + owner];
  }
  double columns(int rank) const { return column_[rank]; }
  // Each rank's tiles, over all owners and columns.
  std::vector<double> RankTotals() const;

 private:
  void AddDiagonals(const std::vector<uint8_t>& diagonals, const kernels::ShardLayout& blocks,
                    double weight);

  int ranks_;
  // Tiles of block diagonals depend on a pair's ranks by their difference (rank - owner + ranks -
  // 1) and, in the zigzag layout, by their sum (rank + owner) alone.
  std::vector<double> apart_;
  std::vector<double> mirrored_;
  std::vector<double> listed_;  // [rank][owner], or empty: other patterns' tiles
  std::vector<double> column_;  // [rank]
};

}  // namespace ringleader::ring
