#include "bench/longca/ring_cells.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <new>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "bench/longca/counting_communicator.h"
#include "bench/longca/problem.h"
#include "patterns/attention_options.h"
#include "ring/division.h"
#include "worker/attention/cpu/cpu_attention_call.h"
#include "worker/attention/runner/ring_runner.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::bench {
namespace {

using kernels::MaskKind;
using kernels::ShardLayout;
using kernels::reference::testing::Shard;
using kernels::reference::testing::Tensor;
using patterns::Pattern;

constexpr uint64_t kSeed = 20251123;

patterns::AttentionOptions OptionsOf(const Asked& asked, const Scheme& scheme) {
  return {.pattern = asked.window > 0 ? Pattern::kSlidingWindow : Pattern::kDense,
          .mask = asked.mask,
          .mask_block = asked.block,
          .window = asked.window,
          .tile = kTile,
          .layout = scheme.layout,
          .stripe = kTile,
          .ring = scheme.ring};
}

// What one rank did.
struct RankRun {
  absl::Status status;
  std::vector<double> forward_ms, backward_ms;  // of repetitions
  double plan_ms = 0;
  double tiles = 0;
  int64_t forward_bytes = 0, backward_bytes = 0;  // sent in a repetition
};

struct Results {
  Tensor out, dq, dk, dv;  // of the whole sequence

  explicit Results(int64_t tokens)
      : out(tokens, kHeads, kHeadDim), dq(out), dk(tokens, kKvHeads, kHeadDim), dv(dk) {}
};

void Put(const Tensor& part, const ShardLayout& layout, Tensor* whole) {
  const int64_t row = int64_t{part.heads} * part.head_dim;
  for (int64_t i = 0; i < part.tokens; ++i) {
    std::copy_n(&part.data[i * row], row, &whole->data[layout.Position(i) * row]);
  }
}

double MillisecondsOf(const std::chrono::steady_clock::time_point& since) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - since)
      .count();
}

absl::Status RunRank(const Problem& problem, const Asked& asked, const Scheme& scheme,
                     int repetitions, comm::Communicator& communicator,
                     const std::atomic<int64_t>& sent, RankRun* run, Results* results) {
  const ShardLayout layout{.kind = scheme.layout,
                           .ranks = communicator.size(),
                           .rank = communicator.rank(),
                           .stripe = kTile,
                           .tokens = problem.tokens};
  const Tensor q = Shard(problem.q, layout), k = Shard(problem.k, layout),
               v = Shard(problem.v, layout), d_out = Shard(problem.d_out, layout);
  attention::CpuAttentionDevice device(&communicator, /*threads=*/1);
  ASSIGN_OR_RETURN(const auto runner,
                   attention::RingRunner::Create(OptionsOf(asked, scheme), &device));
  for (int repetition = -1; repetition < repetitions; ++repetition) {  // the first warms up
    Tensor out(layout.local_tokens(), kHeads, kHeadDim),
        dq = out, dk(layout.local_tokens(), kKvHeads, kHeadDim), dv = dk;
    std::vector<float> lse(kHeads * layout.local_tokens(), -std::numeric_limits<float>::infinity());
    auto start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(runner->SetDocuments(problem.tokens, asked.firsts, 0, asked.prefix_ends));
    run->plan_ms = MillisecondsOf(start);
    attention::CpuCall forward(&device, /*layer=*/0,
                               {q.view(), k.view(), v.view(), out.view(), lse.data()});
    RETURN_IF_ERROR(communicator.Barrier());
    int64_t before = sent;
    start = std::chrono::steady_clock::now();
    ASSIGN_OR_RETURN(const auto index, runner->Forward(forward));
    if (repetition >= 0) run->forward_ms.push_back(MillisecondsOf(start));
    run->forward_bytes = sent - before;
    attention::CpuCall backward(&device, /*layer=*/0,
                                {.q = q.view(),
                                 .k = k.view(),
                                 .v = v.view(),
                                 .out = out.view(),
                                 .lse = lse.data(),
                                 .d_out = d_out.view(),
                                 .dq = dq.view(),
                                 .dk = dk.view(),
                                 .dv = dv.view()});
    RETURN_IF_ERROR(communicator.Barrier());
    before = sent;
    start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(runner->Backward(*index, backward));
    if (repetition >= 0) run->backward_ms.push_back(MillisecondsOf(start));
    run->backward_bytes = sent - before;
    Put(out, layout, &results->out);  // ranks write different rows
    Put(dq, layout, &results->dq);
    Put(dk, layout, &results->dk);
    Put(dv, layout, &results->dv);
    const attention::AttentionStats stats = runner->TakeStats();
    run->tiles = static_cast<double>(stats.TotalTiles());
    run->plan_ms += 1e3 * stats.seconds.index;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RankRun>> RunOnRanks(const Problem& problem, const Asked& asked,
                                                const Scheme& scheme, int repetitions,
                                                Results* results) {
  const int ranks = scheme.ring.ranks();
  std::vector<RankRun> runs(ranks);
  std::vector<std::atomic<int64_t>> sent(ranks);
  auto communicators = comm::testing::LocalCommunicators(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    communicators[rank] =
        std::make_unique<CountingCommunicator>(std::move(communicators[rank]), &sent[rank]);
  }
  comm::testing::RunRanks(std::move(communicators), [&](comm::Communicator& communicator) {
    const int rank = communicator.rank();
    runs[rank].status = RunRank(problem, asked, scheme, repetitions, communicator, sent[rank],
                                &runs[rank], results);
    if (!runs[rank].status.ok()) communicator.Abort(std::string(runs[rank].status.message()));
  });
  for (const RankRun& run : runs) RETURN_IF_ERROR(run.status);
  return runs;
}

// A length that fp64 checks in little time, and every layout takes.
int64_t CheckedTokens(const Scheme& scheme) {
  return int64_t{2} * scheme.ring.ranks() * kTile * (scheme.ring.ranks() > 2 ? 1 : 2);
}

absl::Status Measure(MaskKind kind, const Scheme& scheme, int repetitions,
                     std::vector<Cell>* cells) {
  const Problem checked(CheckedTokens(scheme), kSeed), problem(cells->front().tokens, kSeed);
  Results few(checked.tokens), all(problem.tokens);
  RETURN_IF_ERROR(
      RunOnRanks(checked, *AskFor(checked, kind), scheme, /*repetitions=*/1, &few).status());
  const double error =
      LargestError(checked.Expected(checked.MaskOf(kind), {}), few.out, few.dq, few.dk, few.dv);
  TakePeakMib();
  ASSIGN_OR_RETURN(const std::vector<RankRun> runs,
                   RunOnRanks(problem, *AskFor(problem, kind), scheme, repetitions, &all));
  const double peak_mib = TakePeakMib();
  ASSIGN_OR_RETURN(
      const auto rows,
      IntervalsOf(problem.MaskOf(kind), static_cast<int32_t>(problem.tokens), problem.documents));
  double most_tiles = 0, tiles = 0, plan_ms = 0;
  for (const RankRun& run : runs) {
    most_tiles = std::max(most_tiles, run.tiles);
    tiles += run.tiles;
    plan_ms = std::max(plan_ms, run.plan_ms);
  }
  for (Cell& cell : *cells) {
    const bool is_forward = cell.direction == "forward";
    std::vector<std::vector<double>> times;
    int64_t bytes = 0;
    for (const RankRun& run : runs) {
      times.push_back(is_forward ? run.forward_ms : run.backward_ms);
      bytes = std::max(bytes, is_forward ? run.forward_bytes : run.backward_bytes);
    }
    SetTimes(times, &cell);
    cell.plan_ms = is_forward ? plan_ms : 0;  // backward uses forward's
    cell.mib_moved = static_cast<double>(bytes) / 1048576;
    cell.imbalance = most_tiles * static_cast<double>(runs.size()) / tiles;
    cell.share = static_cast<double>(kernels::VisiblePairs(rows)) /
                 static_cast<double>(problem.tokens * problem.tokens);
    cell.peak_mib = peak_mib;
    cell.error = error;
  }
  return absl::OkStatus();
}

}  // namespace

std::string Scheme::name() const {
  constexpr const char* kKinds[] = {"flat", "hierarchical", "all-gather"};
  return absl::StrCat(kKinds[static_cast<int>(ring.kind)], " ",
                      std::string(ring::LayoutName(layout)));
}

std::vector<Cell> RingCells(MaskKind mask, const Scheme& scheme, int64_t tokens, int repetitions) {
  std::vector<Cell> cells;
  for (const char* direction : {"forward", "backward"}) {
    cells.push_back({.mask = std::string(MaskName(mask)),
                     .choice = "all",
                     .scheme = scheme.name(),
                     .direction = direction,
                     .tokens = tokens,
                     .ranks = scheme.ring.ranks()});
  }
  std::string note = "unsupported";
  if (AskFor(Problem(kTile, kSeed), mask).has_value()) {
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
