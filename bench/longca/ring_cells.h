// Cells of a sequence over ranks: each mask under each scheme, on CPU ranks that are threads of
// this process and run what the trainers of a job run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/longca/cell.h"
#include "bench/longca/scheme.h"
#include "kernels/masks/masks.h"

namespace ringleader::bench {

// Forward and backward at `tokens`, a multiple of 2 × ranks × kTile. "unsupported" with helpers for
// masks that show keys of a later rank.
std::vector<Cell> RingCells(kernels::MaskKind mask, const Scheme& scheme, int64_t tokens,
                            int repetitions);

}  // namespace ringleader::bench
