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
#include "patterns/attention_options.h"
#include "ring/division.h"
#include "ring/head_shares.h"
#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::bench {
namespace {

using kernels::MaskKind;
using kernels::ShardLayout;
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
          .ring = scheme.ring,
          .head_ranks = scheme.head_ranks,
          .head_groups = scheme.head_groups};
}

// The results of a rank, and where in the sequence its tokens lie.
struct Tokens {
  torch::Tensor positions;

  torch::Tensor Of(const Tensor& whole) const {
    return AsTorch(const_cast<Tensor&>(whole)).index_select(0, positions);
  }
  void Put(const torch::Tensor& part, Tensor* whole) const {
    AsTorch(*whole).index_copy_(0, positions, part);
  }

 private:
  static torch::Tensor AsTorch(Tensor& tensor) {
    return torch::from_blob(tensor.data.data(), {tensor.tokens, tensor.heads, tensor.head_dim});
  }
};

Tokens TokensOf(const Scheme& scheme, int64_t tokens, int rank) {
  const ShardLayout layout{.kind = scheme.layout,
                           .ranks = scheme.ring.ranks(),
                           .rank = rank / scheme.head_ranks,
                           .stripe = kTile,
                           .tokens = tokens};
  const int64_t held = tokens / scheme.ranks(), first = rank % scheme.head_ranks * held;
  Tokens mine{torch::empty({held}, torch::kLong)};
  for (int64_t i = 0; i < held; ++i) {
    mine.positions.data_ptr<int64_t>()[i] = layout.Position(first + i);
  }
  return mine;
}

// One rank's communicators: around the ring, and with those it shares heads with.
struct Groups {
  std::unique_ptr<comm::Communicator> ring, heads;

  static absl::StatusOr<Groups> Of(const Scheme& scheme, comm::Communicator& all) {
    const int share = scheme.head_ranks, member = all.rank() % share;
    std::vector<int> ring, heads;
    for (int i = 0; i < scheme.ring.ranks(); ++i) ring.push_back(i * share + member);
    for (int i = 0; i < share; ++i) heads.push_back(all.rank() - member + i);
    Groups groups;
    ASSIGN_OR_RETURN(groups.ring, all.Split(ring));
    if (share > 1) ASSIGN_OR_RETURN(groups.heads, all.Split(heads));
    return groups;
  }
};

absl::Status RunRank(const Problem& problem, const Asked& asked, const Scheme& scheme,
                     int repetitions, comm::Communicator& communicator,
                     const std::atomic<int64_t>& sent, RankRun* run, Results* results) {
  ASSIGN_OR_RETURN(const Groups groups, Groups::Of(scheme, communicator));
  ASSIGN_OR_RETURN(const auto ranks,
                   attention::CreateCpuRingAttention(OptionsOf(asked, scheme), groups.ring.get(),
                                                     groups.heads.get()));
  const Tokens mine = TokensOf(scheme, problem.tokens, communicator.rank());
  const torch::Tensor q = mine.Of(problem.q), k = mine.Of(problem.k), v = mine.Of(problem.v),
                      d_out = mine.Of(problem.d_out);
  for (int repetition = -1; repetition < repetitions; ++repetition) {  // the first warms up
    auto start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(
        ranks->SetDocuments(problem.tokens, asked.firsts, /*padding=*/0, asked.prefix_ends));
    run->plan_ms = MillisecondsSince(start);
    FlushCaches();
    RETURN_IF_ERROR(communicator.Barrier());
    int64_t before = sent;
    start = std::chrono::steady_clock::now();
    const attention::AttentionOutput forward = ranks->Forward(/*layer=*/0, q, k, v);
    if (repetition >= 0) run->forward_ms.push_back(MillisecondsSince(start));
    run->forward_bytes = sent - before;
    FlushCaches();
    RETURN_IF_ERROR(communicator.Barrier());
    before = sent;
    start = std::chrono::steady_clock::now();
    const attention::AttentionGradients gradients =
        forward.record->Backward(q, k, v, forward.out, forward.lse, d_out);
    if (repetition >= 0) run->backward_ms.push_back(MillisecondsSince(start));
    run->backward_bytes = sent - before;
    mine.Put(forward.out, &results->out);
    mine.Put(gradients.dq, &results->dq);
    mine.Put(gradients.dk, &results->dk);
    mine.Put(gradients.dv, &results->dv);
    const attention::AttentionStats stats = ranks->TakeStats();
    run->tiles = static_cast<double>(stats.TotalTiles());
    run->plan_ms += 1e3 * stats.seconds.index;
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
                                      : RunRank(problem, *AskFor(problem, kind), scheme,
                                                repetitions, communicator, bytes, &run, results);
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
  RETURN_IF_ERROR(RunOnRanks(checked, kind, scheme, /*repetitions=*/1, &few).status());
  const double error =
      LargestError(checked.Expected(checked.MaskOf(kind), {}), few.out, few.dq, few.dk, few.dv);
  TakePeakMib();
  ASSIGN_OR_RETURN(const std::vector<RankRun> runs,
                   RunOnRanks(problem, kind, scheme, repetitions, &all));
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
  std::string name = ring.ranks() == 1 ? "ulysses"
                                       : absl::StrCat(head_ranks > 1 ? "usp, " : "",
                                                      kKinds[static_cast<int>(ring.kind)], " ",
                                                      std::string(ring::LayoutName(layout)));
  if (head_groups > 1) absl::StrAppend(&name, " in ", head_groups, " head groups");
  if (has_helpers) absl::StrAppend(&name, " with helpers");
  return name;
}

std::vector<Scheme> SchemesOn(int ranks) {
  using kernels::LayoutKind;
  using ring::RingKind;
  std::vector<Scheme> schemes;
  const auto add = [&](RingKind kind, int inner, LayoutKind layout, Scheme more = {}) {
    more.ring = {kind, inner, kind == RingKind::kHierarchical ? ranks / inner : 1};
    more.layout = layout;
    schemes.push_back(more);
  };
  add(RingKind::kFlat, ranks, LayoutKind::kContiguous);
  add(RingKind::kFlat, ranks, LayoutKind::kContiguous, {.has_helpers = true});
  for (const auto layout : {LayoutKind::kZigzag, LayoutKind::kStriped}) {
    add(RingKind::kFlat, ranks, layout);
    if (ranks % 2 == 0 && ranks > 2) add(RingKind::kHierarchical, ranks / 2, layout);
    add(RingKind::kAllGather, ranks, layout);
  }
  add(RingKind::kAllGather, ranks, LayoutKind::kStriped, {.head_groups = kKvHeads});
  for (int heads = 2; heads <= ranks; ++heads) {
    const ring::HeadShares shares = {.ranks = heads, .heads = kHeads, .kv_heads = kKvHeads};
    if (ranks % heads != 0 || !ring::CheckHeadShares(shares).ok()) continue;
    add(RingKind::kFlat, ranks / heads,
        heads == ranks ? LayoutKind::kContiguous : LayoutKind::kStriped, {.head_ranks = heads});
  }
  return schemes;
}

std::vector<Cell> RingCells(MaskKind mask, const Scheme& scheme, int64_t tokens, int repetitions) {
  std::vector<Cell> cells;
  for (const char* direction : {"forward", "backward"}) {
    cells.push_back({.mask = std::string(MaskName(mask)),
                     .choice = "all",
                     .scheme = scheme.name(),
                     .direction = direction,
                     .tokens = tokens,
                     .ranks = scheme.ranks()});
  }
  std::string note = "unsupported";
  const bool is_able =
      scheme.has_helpers
          ? HelpersCan(Problem(CheckedTokens(scheme), kSeed), mask, scheme.ranks()) &&
                HelpersCan(Problem(tokens, kSeed), mask, scheme.ranks())
          : AskFor(Problem(kTile, kSeed), mask).has_value();
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
