// How ranks share a sequence, in the bench's tables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/longca/asked_mask.h"
#include "bench/longca/pattern_choice.h"
#include "patterns/attention_options.h"
#include "ring/ring_schedule.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::bench {

struct Scheme {
  ring::RingShape ring = {};
  kernels::LayoutKind layout = kernels::LayoutKind::kStriped;
  int head_ranks = 1;        // of each of the ring's: Ulysses and, with a ring, USP
  int head_groups = 1;       // of an all-gather
  bool has_helpers = false;  // helper_ranks.h; `ring` says how many ranks there are

  int ranks() const { return ring.ranks() * head_ranks; }
  std::string name() const;  // "flat striped"
  // What a job of the scheme asks for, whose sequences have `tokens` tokens. `choice` goes with
  // `asked`.
  patterns::AttentionOptions Options(const Asked& asked, const PatternChoice& choice,
                                     int64_t tokens, int tile) const;
  // Where a rank's tokens lie in a sequence of `tokens`, a multiple of 2 × ranks × tile.
  std::vector<int64_t> PositionsOf(int rank, int64_t tokens, int tile) const;
  // The ranks around whose ring `rank` is, in their order, and those that share its heads.
  std::vector<int> RingOf(int rank) const;
  std::vector<int> HeadsOf(int rank) const;
};

// The schemes that the bench compares on so many ranks, as far as its heads divide.
std::vector<Scheme> SchemesOn(int ranks);

}  // namespace ringleader::bench
