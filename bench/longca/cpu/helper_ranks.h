// Helper ranks for contiguous shards under causal attention, DISTFLASHATTN's load balance (arXiv
// 2310.03294, section 3.2): a baseline beside stripes, which need no help. Of P ranks, rank r has
// the keys of r ranks before its own to attend to. At step t = 1 … P / 2 it takes those of rank
// r - t, where there is one; a rank without, r < t, helps instead: it attends with the queries of
// rank P - t + r to its own keys, and sends back what it found. So P / 2 + 1 steps do what P would.
// What a step needs travels during the one before it.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "bench/longca/problem.h"
#include "bench/longca/rank_run.h"
#include "kernels/masks/masks.h"
#include "worker/comm/communicator.h"

namespace ringleader::bench {

// Whether no query sees a key of a later of `ranks` ranks.
bool HelpersCan(const MaskedSequence& sequence, kernels::MaskKind mask, int ranks);

// One rank's forwards and backwards, the first of which warms up. All ranks call it. `sent`: bytes
// that this rank has sent.
absl::Status RunHelperRank(const Problem& problem, kernels::MaskKind mask, int repetitions,
                           comm::Communicator& communicator, const std::atomic<int64_t>& sent,
                           RankRun* run, Results* results);

}  // namespace ringleader::bench
