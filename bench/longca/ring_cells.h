// Cells of a sequence over ranks: each mask under each scheme, on CPU ranks that are threads of
// this process.
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

  std::string name() const;  // "flat striped"
};

// Forward and backward at `tokens`, a multiple of 2 × ranks × kTile. "unsupported" for masks that
// jobs cannot ask for.
std::vector<Cell> RingCells(kernels::MaskKind mask, const Scheme& scheme, int64_t tokens,
                            int repetitions);

}  // namespace ringleader::bench
