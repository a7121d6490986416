// Cells of a sequence over ranks: each mask under each scheme, on CPU ranks that are threads of
// this process and run what the trainers of a job run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/longca/cell.h"
#include "kernels/masks/masks.h"
#include "ring/ring_schedule.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::bench {

// How ranks share a sequence.
struct Scheme {
  ring::RingShape ring;
  kernels::LayoutKind layout = kernels::LayoutKind::kStriped;
  int head_ranks = 1;        // of each of the ring's: Ulysses and, with a ring, USP
  int head_groups = 1;       // of an all-gather
  bool has_helpers = false;  // helper_ranks.h; `ring` says how many ranks there are

  int ranks() const { return ring.ranks() * head_ranks; }
  std::string name() const;  // "flat striped"
};

// The schemes that the bench compares on so many ranks, as far as its heads divide.
std::vector<Scheme> SchemesOn(int ranks);

// Forward and backward at `tokens`, a multiple of 2 × ranks × kTile. "unsupported" for masks that
// jobs cannot ask for, with helpers for masks that show keys of a later rank.
std::vector<Cell> RingCells(kernels::MaskKind mask, const Scheme& scheme, int64_t tokens,
                            int repetitions);

}  // namespace ringleader::bench
