// Steps 4 and 5 of ringleader/kernels/index.h on the CPU: from masses to the selection, the same on
// all ranks.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "ringleader/kernels/index.h"

namespace ringleader::kernels::reference {

// What a rank puts forward for one column; ranks exchange them as bytes.
struct ColumnCandidate {
  int64_t position = std::numeric_limits<int64_t>::max();  // max: an unused slot
  int64_t mass = 0;
};

// A rank's best columns of one head: first its forced ones (position < sink_tokens), then by
// falling mass, as many as fit into out[count]. column_mass: [n]. Candidates of all ranks suffice
// for any selection of up to `count` columns. `late`: TiesGoLate.
void CandidateColumns(const int32_t* column_mass, const ShardLayout& layout, int64_t sink_tokens,
                      int32_t count, ColumnCandidate* out, bool late = false);

// What a selection came to.
struct Taken {
  int64_t mass = 0;
  bool at_budget = false;  // its count ended it before its mass was reached
};

// Selects from candidates[candidate_count] of all ranks, in any order. Writes ascending positions,
// unused slots at the end, and returns how many it selected: at most max(max_count, forced).
// `total` is the mass of all columns of the head. positions: [capacity]
int32_t SelectColumns(const ColumnCandidate* candidates, int64_t candidate_count, int64_t total,
                      int64_t sink_tokens, float mass, int32_t max_count, int32_t capacity,
                      int64_t* positions, Taken* taken = nullptr, bool late = false);

// diagonal_mass: [blocks]; forces the main diagonal and `local_blocks` next to it. Sets bits in
// words[(blocks + 63) / 64] and returns how many. `by_tiles`: DiagonalCost's, in a sequence of
// `content_blocks` before its padding; 0: of `blocks`.
int32_t SelectDiagonals(const int32_t* diagonal_mass, int64_t blocks, int32_t local_blocks,
                        float mass, int32_t max_count, uint64_t* words, bool by_tiles = false,
                        Taken* taken = nullptr, int64_t content_blocks = 0);

// AdaptedCount for every head. max_counts: [2, heads], of columns and of diagonals.
void AdaptBudgets(std::span<const double> recall, int32_t* max_counts);

}  // namespace ringleader::kernels::reference
