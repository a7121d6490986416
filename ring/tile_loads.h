// How many attention tiles each rank visits of each owner's keys, counted from the pattern: exactly
// what the kernels will visit, without a tensor. A ring step's load is that of the owner whose keys
// the step attends to (ring_schedule.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ringleader/kernels/shard_layout.h"

namespace ringleader::ring {

// What one head visits, in blocks of one tile's edge. Causal, key block <= query block, but for
// `ahead`.
struct HeadPattern {
  // Block diagonals: query block A attends to key block A - delta where diagonals[delta] is set.
  std::vector<uint8_t> diagonals;  // [blocks], or empty
  // The share of the query blocks A that attend to key block A + delta; none beyond its end.
  std::vector<double> ahead;
  // Key blocks by query block, for patterns that are no diagonals. Where a row has too many to
  // list, each that is listed stands for row_weights[row] tiles.
  std::vector<int64_t> row_offsets;  // [blocks + 1], or empty
  std::vector<int32_t> columns;
  std::vector<double> row_weights;  // [blocks], or empty: 1
  // Selected single columns in each key block; all later query blocks attend to them.
  std::vector<double> columns_in_block;  // [blocks], or empty
};

// What a rank visits of one owner's keys, apart from block diagonals.
struct ListedLoad {
  int rank = 0;
  int owner = 0;
  double tiles = 0;
};

// Sums over heads. Tiles outside the ring (selected columns) count as dense tiles. Takes memory by
// ranks and by listed tiles, not by ranks².
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
  double of(int rank, int owner) const;
  double columns(int rank) const { return column_[rank]; }
  // What of(rank, owner) is the sum of: a part by rank - owner, one by rank + owner (zero unless
  // is_mirrored()), and what is listed, by rank and owner.
  double apart(int difference) const { return apart_[difference + ranks_ - 1]; }
  bool is_mirrored() const { return is_mirrored_; }
  double mirrored(int sum) const { return mirrored_[sum]; }
  std::span<const ListedLoad> listed() const { return listed_; }

  // Each rank's tiles, over all owners and columns.
  std::vector<double> RankTotals() const;
  // Mean over ranks of max/mean over owners, which are the ring's steps; 1 where there are no
  // tiles.
  double StepImbalance() const;

 private:
  // chunk_weights: ChunkWeights(). direction: 1 for keys before the queries, -1 for those ahead.
  void AddDiagonals(std::span<const double> chunk_weights, const kernels::ShardLayout& blocks,
                    double weight, int direction);
  void AddRows(const HeadPattern& head, const kernels::ShardLayout& blocks, double weight);
  std::vector<double> RingTotals() const;
  std::vector<double> LargestSteps() const;

  int ranks_;
  // Tiles of block diagonals depend on a pair's ranks by their difference (rank - owner + ranks -
  // 1) and, in the zigzag layout, by their sum (rank + owner) alone.
  std::vector<double> apart_;
  std::vector<double> mirrored_;
  bool is_mirrored_ = false;
  std::vector<ListedLoad> listed_;  // in order of rank and owner, each pair once
  std::vector<double> column_;      // [rank]
};

}  // namespace ringleader::ring
