#include "bench/longca/ring_cells.h"

#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <new>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "bench/longca/asked_mask.h"
#include "bench/longca/counting_communicator.h"
#include "bench/longca/helper_ranks.h"
#include "bench/longca/problem.h"
#include "bench/longca/rank_run.h"
#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::bench {
namespace {

using kernels::MaskKind;
using kernels::reference::testing::Tensor;

constexpr uint64_t kSeed = 20251123;

torch::Tensor AsTorch(const Tensor& tensor) {
  return torch::from_blob(const_cast<float*>(tensor.data.data()),
                          {tensor.tokens, tensor.heads, tensor.head_dim});
}

attention::RingBytes BytesOf(int64_t sent, const attention::AttentionStats& stats) {
  return {.sent = static_cast<uint64_t>(sent), .whole = stats.ring_bytes.whole + stats.head_bytes};
}

absl::Status RunRank(const Problem& problem, const Asked& asked, const Scheme& scheme,
                     int repetitions, comm::Communicator& communicator,
                     const std::atomic<int64_t>& sent, RankRun* run, Results* results) {
  const int rank = communicator.rank();
  ASSIGN_OR_RETURN(const auto ring, communicator.Split(scheme.RingOf(rank)));
  std::unique_ptr<comm::Communicator> heads;
  if (scheme.head_ranks > 1) {
    ASSIGN_OR_RETURN(heads, communicator.Split(scheme.HeadsOf(rank)));
  }
  ASSIGN_OR_RETURN(const auto ranks, attention::CreateCpuRingAttention(scheme.Options(asked, kTile),
                                                                       ring.get(), heads.get()));
  const torch::Tensor positions =
      torch::tensor(scheme.PositionsOf(rank, problem.tokens, kTile), torch::kLong);
  const auto mine = [&](const Tensor& x) { return AsTorch(x).index_select(0, positions); };
  const auto put = [&](const torch::Tensor& part, const Tensor& whole) {
    AsTorch(whole).index_copy_(0, positions, part);
  };
  const torch::Tensor q = mine(problem.q), k = mine(problem.k), v = mine(problem.v),
                      d_out = mine(problem.d_out);
  for (int repetition = -1; repetition < repetitions; ++repetition) {  // the first warms up
    auto start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(SetMask(asked, problem.tokens, ranks.get()));
    run->plan_ms = MillisecondsSince(start);
    if (repetition >= 0) FlushCaches();
    RETURN_IF_ERROR(communicator.Barrier());
    int64_t before = sent;
    start = std::chrono::steady_clock::now();
    const attention::AttentionOutput forward = ranks->Forward(/*layer=*/0, q, k, v);
    if (repetition >= 0) run->forward_ms.push_back(MillisecondsSince(start));
    const attention::AttentionStats stats = ranks->TakeStats();
    run->forward_bytes = BytesOf(sent - before, stats);
    run->tiles = static_cast<double>(stats.TotalTiles());
    run->plan_ms += 1e3 * stats.seconds.index;
    if (repetition >= 0) FlushCaches();
    RETURN_IF_ERROR(communicator.Barrier());
    before = sent;
    start = std::chrono::steady_clock::now();
    const attention::AttentionGradients gradients =
        forward.record->Backward(q, k, v, forward.out, forward.lse, d_out);
    if (repetition >= 0) run->backward_ms.push_back(MillisecondsSince(start));
    run->backward_bytes = BytesOf(sent - before, ranks->TakeStats());
    put(forward.out, results->out);
    put(gradients.dq, results->dq);
    put(gradients.dk, results->dk);
    put(gradients.dv, results->dv);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RankRun>> RunOnRanks(const Problem& problem, MaskKind kind,
                                                const Scheme& scheme, int repetitions,
                                                Results* results) {
  at::set_num_threads(1);
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
      run.status = scheme.has_helpers ? RunHelperRank(problem, kind, repetitions, communicator,
                                                      bytes, &run, results)
                                      : RunRank(problem, AskFor(problem, kind), scheme, repetitions,
                                                communicator, bytes, &run, results);
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

absl::Status Measure(MaskKind kind, const Scheme& scheme, int repetitions,
                     std::vector<Cell>* cells) {
  const Problem checked(CheckedTokens(scheme), kSeed), problem(cells->front().tokens, kSeed);
  Results few(checked.tokens), all(problem.tokens);
  RETURN_IF_ERROR(RunOnRanks(checked, kind, scheme, /*repetitions=*/0, &few).status());
  const double error =
      LargestError(checked.Expected(checked.MaskOf(kind), {}), few.out, few.dq, few.dk, few.dv);
  TakePeakMib();
  ASSIGN_OR_RETURN(const std::vector<RankRun> runs,
                   RunOnRanks(problem, kind, scheme, repetitions, &all));
  const double peak_mib = TakePeakMib();
  ASSIGN_OR_RETURN(
      const auto rows,
      IntervalsOf(problem.MaskOf(kind), static_cast<int32_t>(problem.tokens), problem.documents));
  for (Cell& cell : *cells) {
    FillFrom(runs, &cell);
    cell.share = static_cast<double>(kernels::VisiblePairs(rows)) /
                 static_cast<double>(problem.tokens * problem.tokens);
    cell.peak_mib = peak_mib;
    cell.error = error;
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<Cell> RingCells(MaskKind mask, const Scheme& scheme, int64_t tokens, int repetitions) {
  std::vector<Cell> cells = EmptyCells(mask, scheme, tokens);
  std::string note = "unsupported";
  const bool is_able =
      !scheme.has_helpers || (HelpersCan({CheckedTokens(scheme), kSeed}, mask, scheme.ranks()) &&
                              HelpersCan({tokens, kSeed}, mask, scheme.ranks()));
  if (is_able) {
    try {
      note = std::string(Measure(mask, scheme, repetitions, &cells).message());
    } catch (const std::bad_alloc&) {
      note = "out of memory";
    }
  }
  for (Cell& cell : cells) cell.note = note;
  return cells;
}

}  // namespace ringleader::bench
