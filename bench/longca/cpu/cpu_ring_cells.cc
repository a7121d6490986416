#include "bench/longca/cpu/cpu_ring_cells.h"

#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "bench/longca/asked_mask.h"
#include "bench/longca/cpu/counting_communicator.h"
#include "bench/longca/cpu/cpu_helper_device.h"
#include "bench/longca/problem.h"
#include "bench/longca/ranks/helper_ranks.h"
#include "bench/longca/ranks/rank_rows.h"
#include "bench/longca/visited_pairs.h"
#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::bench {
namespace {

// What ranks tell each other to choose by is sent whatever hops carry.
attention::RingBytes BytesOf(int64_t sent, const attention::AttentionStats& stats,
                             const PatternChoice& choice) {
  const auto bytes = static_cast<uint64_t>(sent);
  const uint64_t of_choice = choice.is_all() ? 0 : bytes - stats.ring_bytes.sent - stats.head_bytes;
  return {.sent = bytes, .whole = stats.ring_bytes.whole + stats.head_bytes + of_choice};
}

absl::Status RunRank(const Problem& problem, const Setting& setting, int repetitions,
                     comm::Communicator& communicator, const std::atomic<int64_t>& sent,
                     RankRun* run, Results* results) {
  const Scheme& scheme = setting.scheme;
  const Asked asked = AskFor(problem, setting.mask);
  const int rank = communicator.rank();
  ASSIGN_OR_RETURN(const auto ring, communicator.Split(scheme.RingOf(rank)));
  std::unique_ptr<comm::Communicator> heads;
  if (scheme.head_ranks > 1) {
    ASSIGN_OR_RETURN(heads, communicator.Split(scheme.HeadsOf(rank)));
  }
  ASSIGN_OR_RETURN(
      const auto ranks,
      attention::CreateCpuRingAttention(
          scheme.Options(asked, setting.choice, problem.tokens, kTile), ring.get(), heads.get()));
  const RankRows mine(scheme, rank, problem.tokens, kTile);
  const torch::Tensor q = mine.Of(problem.q), k = mine.Of(problem.k), v = mine.Of(problem.v),
                      d_out = mine.Of(problem.d_out);
  for (int repetition = -1; repetition < repetitions; ++repetition) {  // the first warms up
    auto start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(SetMask(asked, problem.tokens, ranks.get()));
    const double mask_ms = MillisecondsSince(start);
    if (repetition >= 0) FlushCaches();
    RETURN_IF_ERROR(communicator.Barrier());
    int64_t before = sent;
    start = std::chrono::steady_clock::now();
    const attention::AttentionOutput forward = ranks->Forward(/*layer=*/0, q, k, v);
    const double forward_ms = MillisecondsSince(start);
    const attention::AttentionStats stats = ranks->TakeStats();
    run->forward_bytes = BytesOf(sent - before, stats, setting.choice);
    run->tiles = static_cast<double>(stats.TotalTiles());
    const double index_ms = 1e3 * stats.seconds.index;
    if (repetition >= 0) run->forward_ms.push_back(forward_ms - index_ms);
    if (repetition >= 0) run->plan_ms.push_back(mask_ms + index_ms);
    if (repetition >= 0) FlushCaches();
    RETURN_IF_ERROR(communicator.Barrier());
    before = sent;
    start = std::chrono::steady_clock::now();
    const attention::AttentionGradients gradients =
        forward.record->Backward(q, k, v, forward.out, forward.lse, d_out);
    if (repetition >= 0) run->backward_ms.push_back(MillisecondsSince(start));
    run->backward_bytes = BytesOf(sent - before, ranks->TakeStats(), setting.choice);
    mine.Put(forward.out, gradients.dq, gradients.dk, gradients.dv, results);
  }
  return absl::OkStatus();
}

absl::Status RunHelpers(const Problem& problem, const Setting& setting, int repetitions,
                        comm::Communicator& communicator, RankRun* run, Results* results) {
  const auto planning = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(const auto rows,
                   IntervalsOf(problem.MaskOf(setting.mask), static_cast<int32_t>(problem.tokens),
                               problem.documents));
  run->plan_ms = {MillisecondsSince(planning)};
  const RankRows mine(setting.scheme, communicator.rank(), problem.tokens, kTile);
  const auto device = CreateCpuHelperDevice(rows, &communicator);
  ASSIGN_OR_RETURN(const HelperOutputs found,
                   RunHelperRank({.q = mine.Of(problem.q),
                                  .k = mine.Of(problem.k),
                                  .v = mine.Of(problem.v),
                                  .d_out = mine.Of(problem.d_out)},
                                 rows, /*warm_ups=*/1, repetitions, *device, run));
  mine.Put(found.out, found.dq, found.dk, found.dv, results);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RankRun>> RunOnRanks(const Problem& problem, const Setting& setting,
                                                int repetitions, Results* results) {
  at::set_num_threads(1);
  const Scheme& scheme = setting.scheme;
  std::vector<RankRun> runs(scheme.ranks());
  std::vector<std::atomic<int64_t>> sent(scheme.ranks());
  auto communicators = comm::testing::LocalCommunicators(scheme.ranks());
  for (int rank = 0; rank < scheme.ranks(); ++rank) {
    communicators[rank] =
        std::make_unique<CountingCommunicator>(std::move(communicators[rank]), &sent[rank]);
  }
  comm::testing::RunRanks(std::move(communicators), [&](comm::Communicator& communicator) {
    RankRun& run = runs[communicator.rank()];
    const std::atomic<int64_t>& bytes = sent[communicator.rank()];
    try {
      run.status = scheme.has_helpers
                       ? RunHelpers(problem, setting, repetitions, communicator, &run, results)
                       : RunRank(problem, setting, repetitions, communicator, bytes, &run, results);
    } catch (const c10::Error& error) {
      run.status = absl::InternalError(error.what_without_backtrace());
    }
    if (!run.status.ok()) communicator.Abort(std::string(run.status.message()));
  });
  for (const RankRun& run : runs) RETURN_IF_ERROR(run.status);
  return runs;
}

// A length that fp64 checks in little time, and every layout takes.
int64_t CheckedTokens(const Scheme& scheme) {
  return int64_t{2} * scheme.ranks() * kTile * (scheme.ranks() > 2 ? 1 : 2);
}

absl::StatusOr<VisitedPairs> VisitedBy(const Setting& setting, const Problem& problem) {
  VisitedPairs visited(problem.tokens);
  Results results(problem.tokens);
  for (int64_t first = 0; first < problem.tokens; first += kHeadDim) {
    RETURN_IF_ERROR(
        RunOnRanks(VisitedPairs::Probe(problem, first), setting, /*repetitions=*/0, &results)
            .status());
    visited.Learn(results.out, first);
  }
  return visited;
}

}  // namespace

struct CpuRingCells::Checked {
  Problem problem;
  std::vector<char> shown;  // by the mask, [tokens, tokens]
  VisitedPairs visited;     // of a choice
  kernels::reference::testing::MaskedAttention expected;
};

bool CpuRingCells::IsSupported(const Setting& setting, int64_t tokens) const {
  for (const int64_t length : {CheckedTokens(setting.scheme), tokens}) {
    if (!IsPossible(setting, {length, kSeed, lengths_}, kTile)) return false;
  }
  return true;
}

absl::StatusOr<std::shared_ptr<const CpuRingCells::Checked>> CpuRingCells::CheckedOf(
    const Setting& setting, int64_t tokens) {
  const auto& [mask, choice, scheme] = setting;
  std::shared_ptr<const Checked>& known = checked_[{mask, choice.pattern, choice.density, tokens}];
  if (known != nullptr) return known;
  const Problem problem(tokens, kSeed, lengths_);
  const kernels::Mask of = problem.MaskOf(mask);
  VisitedPairs visited(tokens);
  kernels::reference::testing::Visible is_visited;
  if (!choice.is_all()) {
    ASSIGN_OR_RETURN(visited, VisitedBy({mask, choice, SchemesOn(1).front()}, problem));
    is_visited = visited;
  }
  auto expected = problem.Expected(of, is_visited);
  known = std::make_shared<const Checked>(
      Checked{problem, problem.Shown(of), std::move(visited), std::move(expected)});
  return known;
}

absl::Status CpuRingCells::Fill(const Setting& setting, int repetitions, std::vector<Cell>* cells) {
  ASSIGN_OR_RETURN(const auto checked, CheckedOf(setting, CheckedTokens(setting.scheme)));
  Results few(checked->problem.tokens);
  RETURN_IF_ERROR(RunOnRanks(checked->problem, setting, /*repetitions=*/0, &few).status());
  double error = LargestError(checked->expected, few.out, few.dq, few.dk, few.dv);
  if (!setting.choice.is_all()) {
    ASSIGN_OR_RETURN(const VisitedPairs visited, VisitedBy(setting, checked->problem));
    if (visited != checked->visited || !visited.IsWithin(checked->shown)) {
      error = std::numeric_limits<double>::infinity();
    }
  }
  const Problem problem(cells->front().tokens, kSeed, lengths_);
  Results results(problem.tokens);
  TakePeakMib();
  ASSIGN_OR_RETURN(const std::vector<RankRun> runs,
                   RunOnRanks(problem, setting, repetitions, &results));
  const double peak_mib = TakePeakMib();
  ASSIGN_OR_RETURN(const auto rows,
                   IntervalsOf(problem.MaskOf(setting.mask), static_cast<int32_t>(problem.tokens),
                               problem.documents));
  for (Cell& cell : *cells) {
    FillFrom(runs, &cell);
    cell.share = ShareOf(runs, setting, rows, kHeads, kTile);
    cell.peak_mib = peak_mib;
    cell.error = error;
  }
  return absl::OkStatus();
}

std::vector<Cell> CpuRingCells::Measure(const Setting& setting, int64_t tokens, int repetitions) {
  std::vector<Cell> cells = EmptyCells(setting, tokens);
  std::string note = "unsupported";
  if (IsSupported(setting, tokens)) {
    try {
      note = std::string(Fill(setting, repetitions, &cells).message());
    } catch (const std::bad_alloc&) {
      note = "out of memory";
    }
  }
  for (Cell& cell : cells) cell.note = note;
  return cells;
}

}  // namespace ringleader::bench
