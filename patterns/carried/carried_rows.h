// Which rows the hops of a ring carry where positions alone say what is attended to. Trainers carry
// them, and the planner prices what they carry.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "patterns/attention_options.h"
#include "patterns/index/layer_index.h"
#include "ring/ring_schedule.h"
#include "ring/travelling_rows.h"

namespace ringleader::patterns {

// Finding the rows takes the square of the ranks; of more, hops carry all.
inline constexpr int kMostRanksOfRows = 256;

// A sequence in a ring, which every rank knows.
struct RingSequence {
  int64_t tokens = 0;                         // places that all ranks have together
  std::span<const int64_t> firsts = {};       // where its documents start; empty: it is one
  std::span<const int64_t> prefix_ends = {};  // MaskRule's
  int64_t padding = 0;                        // likewise
  std::span<const int64_t> held = {};  // how many of its places, its first ones, each rank holds;
                                       // empty: all
  // What each query sees, [tokens] by position; empty: what the options' mask says. Then every rank
  // holds all of its places, and nothing else above is looked at.
  std::span<const kernels::KeyIntervals> listed = {};
};

// What a layer attends to, which `is_dense` or not; nullopt where the data choose.
std::optional<KnownKeys> KnownKeysOf(const AttentionOptions& options, bool is_dense);

// Whether hops of such a ring leave out what nobody attends to: there are few ranks enough to find
// it, and they do not gather.
bool CarriesRows(const ring::RingShape& shape);

// FindTravellingRows() of the rank of `schedule`, and CountTravellingRows() of all ranks, of
// `options`' mask and layout with KnownKeysOf() them.
ring::TravellingRows FindCarriedRows(const AttentionOptions& options,
                                     const ring::RingSchedule& schedule,
                                     const RingSequence& sequence, const KnownKeys& known);
ring::HopCounts CountCarriedRows(const AttentionOptions& options, const ring::RingShape& shape,
                                 bool is_backward, const RingSequence& sequence,
                                 const KnownKeys& known, double most_packed);

}  // namespace ringleader::patterns
