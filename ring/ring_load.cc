#include "ring/ring_load.h"

#include <algorithm>
#include <numeric>

#include "ringleader/kernels/index.h"

namespace ringleader::ring {

namespace {

int64_t Sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

}  // namespace

double RingLoad::TotalTiles() const {
  double total = 0.0;
  for (const std::vector<int64_t>& rank : tiles) total += static_cast<double>(Sum(rank));
  return total;
}

double RingLoad::WorkerImbalance() const {
  int64_t largest = 0;
  for (const std::vector<int64_t>& rank : tiles) largest = std::max(largest, Sum(rank));
  return largest == 0 ? 1.0 : static_cast<double>(largest * tiles.size()) / TotalTiles();
}

double RingLoad::StepImbalance() const {
  int64_t largest = 0;
  size_t steps = 0;
  for (const std::vector<int64_t>& rank : tiles) {
    steps += rank.size();
    for (const int64_t step : rank) largest = std::max(largest, step);
  }
  return largest == 0 ? 1.0 : static_cast<double>(largest * steps) / TotalTiles();
}

double RingLoad::LockStepEfficiency() const {
  int64_t slowest = 0;
  for (size_t step = 0; step < tiles[0].size(); ++step) {
    int64_t largest = 0;
    for (const std::vector<int64_t>& rank : tiles) largest = std::max(largest, rank[step]);
    slowest += largest;
  }
  return slowest == 0 ? 1.0 : TotalTiles() / static_cast<double>(slowest * tiles.size());
}

RingLoad DiagonalLoad(const uint64_t* diagonals, int32_t diagonal_words, int heads,
                      const kernels::ShardLayout& layout, int32_t tile, const RingShape& shape) {
  // Heads only matter by how many of them have a diagonal.
  const int64_t blocks = (layout.tokens + tile - 1) / tile;
  std::vector<int64_t> count(blocks, 0);
  for (int head = 0; head < heads; ++head) {
    const uint64_t* words = diagonals + int64_t{head} * diagonal_words;
    for (int64_t delta = 0; delta < blocks; ++delta) {
      count[delta] += static_cast<int64_t>(words[delta / 64] >> (delta % 64) & 1);
    }
  }
  RingLoad load;
  kernels::ShardLayout query = layout, key = layout;
  for (query.rank = 0; query.rank < layout.ranks; ++query.rank) {
    std::vector<int64_t>& steps = load.tiles.emplace_back();
    const RingSchedule schedule = *ForwardSchedule(shape, query.rank);
    for (const RingStep& step : schedule.steps) {
      key.rank = step.owner;
      int64_t tiles = 0;
      for (int64_t delta = 0; delta < blocks; ++delta) {
        if (count[delta] == 0) continue;
        tiles += count[delta] * kernels::DiagonalTiles(query, key, tile, delta);
      }
      steps.push_back(tiles);
    }
  }
  return load;
}

RingLoad CausalLoad(const kernels::ShardLayout& layout, int32_t tile, const RingShape& shape) {
  const int64_t blocks = (layout.tokens + tile - 1) / tile;
  const std::vector<uint64_t> all((blocks + 63) / 64, ~uint64_t{0});
  return DiagonalLoad(all.data(), static_cast<int32_t>(all.size()), 1, layout, tile, shape);
}

}  // namespace ringleader::ring
