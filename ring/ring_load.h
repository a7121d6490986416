// How much attention every rank computes at every ring step, exactly, before any of it is computed.
//
// Vertical-slash selections are Toeplitz over blocks: one set diagonal costs a known number of
// tiles of each (rank, owner) pair. With stripes of one tile on a flat ring, step t costs every
// rank the diagonals of residue t modulo the number of ranks, which is why stripes balance any
// selection.
#pragma once

#include <cstdint>
#include <vector>

#include "ring/ring_schedule.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::ring {

struct RingLoad {
  std::vector<std::vector<int64_t>> tiles;  // [rank][step], all heads

  double TotalTiles() const;
  // max / mean over ranks of their total.
  double WorkerImbalance() const;
  // max / mean over all ranks and steps.
  double StepImbalance() const;
  // Mean total / sum over steps of the slowest rank: the share of the time that ranks compute when
  // they wait for each other at every step.
  double LockStepEfficiency() const;
};

// diagonals: [heads, diagonal_words], as in TileSelection. layout.rank is ignored; its ranks are
// shape.inner * shape.outer.
RingLoad DiagonalLoad(const uint64_t* diagonals, int32_t diagonal_words, int heads,
                      const kernels::ShardLayout& layout, int32_t tile, const RingShape& shape);

// The same for dense causal attention, one head.
RingLoad CausalLoad(const kernels::ShardLayout& layout, int32_t tile, const RingShape& shape);

}  // namespace ringleader::ring
