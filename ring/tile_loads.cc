#include "ring/tile_loads.h"

#include <algorithm>
#include <numeric>

namespace ringleader::ring {
namespace {

using kernels::LayoutKind;

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

void AddStriped(const std::vector<double>& weights, double weight, TileLoads* loads) {
  const int ranks = loads->ranks;
  const auto chunks = static_cast<int64_t>(weights.size());
  const int64_t per_rank = chunks / ranks;
  // By residue: [0] for r >= j, [1] for r < j, where the first stripe has no partner.
  std::vector<double> work[2];
  for (int wrapped = 0; wrapped < 2; ++wrapped) {
    work[wrapped].assign(ranks, 0.0);
    for (int64_t x = 0; x < chunks; ++x) {
      const int64_t pairs = per_rank - x / ranks - wrapped;
      if (pairs > 0) work[wrapped][x % ranks] += weights[x] * static_cast<double>(pairs);
    }
  }
  for (int r = 0; r < ranks; ++r) {
    double* row = &loads->ring[size_t(r) * ranks];
    for (int j = 0; j <= r; ++j) row[j] += weight * work[0][r - j];
    for (int j = r + 1; j < ranks; ++j) row[j] += weight * work[1][r - j + ranks];
  }
}

void AddChunks(const std::vector<double>& weights, const Dealing& dealing, double weight,
               TileLoads* loads) {
  const auto chunks = static_cast<int64_t>(weights.size());
  for (int64_t i = 0; i < chunks; ++i) {
    double* row = &loads->ring[size_t(dealing.Owner(i)) * loads->ranks];
    for (int64_t x = 0; x <= i; ++x) {
      if (weights[x] != 0) row[dealing.Owner(i - x)] += weight * weights[x];
    }
  }
}

void AddRows(const HeadPattern& head, const Dealing& dealing, double weight, TileLoads* loads) {
  const int64_t chunk = dealing.chunk_blocks();
  for (int64_t q = 0; q < dealing.blocks; ++q) {
    double* row = &loads->ring[size_t(dealing.Owner(q / chunk)) * loads->ranks];
    for (int64_t k = head.row_offsets[q]; k < head.row_offsets[q + 1]; ++k) {
      row[dealing.Owner(head.columns[k] / chunk)] += weight;
    }
  }
}

}  // namespace

int64_t Dealing::chunk_blocks() const {
  switch (kind) {
    case LayoutKind::kContiguous:
      return blocks / ranks;
    case LayoutKind::kZigzag:
      return blocks / (int64_t{2} * ranks);
    case LayoutKind::kStriped:
      return stripe_blocks;
  }
  return 1;
}

int Dealing::Owner(int64_t chunk) const {
  switch (kind) {
    case LayoutKind::kContiguous:
      return static_cast<int>(chunk);
    case LayoutKind::kZigzag:
      return static_cast<int>(chunk < ranks ? chunk : 2 * ranks - 1 - chunk);
    case LayoutKind::kStriped:
      return static_cast<int>(chunk % ranks);
  }
  return 0;
}

double TileLoads::rank_total(int rank) const {
  const auto begin = ring.begin() + int64_t(rank) * ranks;
  return std::accumulate(begin, begin + ranks, column[rank]);
}

double TileLoads::total() const {
  return std::accumulate(ring.begin(), ring.end(), 0.0) +
         std::accumulate(column.begin(), column.end(), 0.0);
}

void TileLoads::Scale(double factor) {
  for (double& tiles : ring) tiles *= factor;
  for (double& tiles : column) tiles *= factor;
}

double TileLoads::worker_imbalance() const {
  double largest = 0, sum = 0;
  for (int r = 0; r < ranks; ++r) {
    const double mine = rank_total(r);
    largest = std::max(largest, mine);
    sum += mine;
  }
  return sum > 0 ? largest * ranks / sum : 1.0;
}

void AddHead(const HeadPattern& head, const Dealing& dealing, int tile, double weight,
             TileLoads* loads) {
  if (!head.diagonals.empty()) {
    const std::vector<double> weights = ChunkWeights(head.diagonals, dealing.chunk_blocks());
    if (dealing.kind == LayoutKind::kStriped) {
      AddStriped(weights, weight, loads);
    } else {
      AddChunks(weights, dealing, weight, loads);
    }
  }
  if (!head.row_offsets.empty()) AddRows(head, dealing, weight, loads);
  if (!head.columns_in_block.empty()) {
    const int64_t chunk = dealing.chunk_blocks();
    double before = 0;
    for (int64_t q = 0; q < dealing.blocks; ++q) {
      loads->column[dealing.Owner(q / chunk)] += weight * before / tile;
      before += head.columns_in_block[q];
    }
  }
}

}  // namespace ringleader::ring
