// Sample patterns: what heads are likely to choose, for predictions before (and after) a job's own
// reports say so.
#pragma once

#include <cstdint>
#include <vector>

#include "ring/tile_loads.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::planner {

// Means over heads from a job's reports; 0: not measured.
struct PatternHints {
  double slashes = 0;    // block diagonals
  double verticals = 0;  // columns
  // Share of the causal tiles that a layer visits. It also depends on where the diagonals lie, so
  // where it is known, loads are scaled to it.
  double density = 0;
};

// `heads` heads of one layer at `blocks` blocks. Deterministic in `seed`. Static patterns give one
// exact head. vertical_slash: a local band, clusters of far diagonals, sink and scattered columns.
// block_topk: half of each row's choices are blocks that the whole head favours.
std::vector<ring::HeadPattern> SampleLayer(const v1::AttentionSpec& attention, bool dense,
                                           int64_t blocks, int heads, const PatternHints& hints,
                                           uint64_t seed);

}  // namespace ringleader::planner
