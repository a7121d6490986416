#include "bench/longca/gpu/gpu_ring_cells.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/synchronization/notification.h"
#include "base/status_macros.h"
#include "bench/longca/asked_mask.h"
#include "bench/longca/gpu/gpu_helper_device.h"
#include "bench/longca/ranks/helper_ranks.h"
#include "bench/longca/ranks/rank_rows.h"
#include "bench/longca/visited_pairs.h"
#include "kernels/ops/cuda_call.h"
#include "worker/attention/cuda/cuda_ring_attention.h"
#include "worker/comm/nccl/nccl_communicator.h"
#include "worker/comm/testing/local_communicator.h"
#include "worker/comm/testing/local_device_communicator.h"

namespace ringleader::bench {
namespace {

using comm::DeviceCommunicator;
using kernels::ops::Check;
using kernels::ops::Stream;
using kernels::reference::testing::Tensor;

// A check of choices has several blocks to choose from, however few ranks there are.
constexpr int64_t kCheckedTokens = 1024;
constexpr double kTolerance = 2e-2;  // bf16 in, out, and in what backward multiplies
constexpr int kWarmUps = 2;
constexpr int64_t kFlushedBytes = int64_t{256} << 20;

// The tile of the fastest kernels that take the choice.
int TileOf(const PatternChoice& choice) {
  return choice.pattern == patterns::Pattern::kKeyGroups ? 64 : 128;
}

int64_t CheckedTokens(const Setting& setting) {
  const int64_t fewest = int64_t{2} * setting.scheme.ranks() * 128;
  if (setting.choice.is_all()) return fewest;
  return (kCheckedTokens + fewest - 1) / fewest * fewest;
}

HelperInputs PartOf(const Problem& problem, const RankRows& rows) {
  const auto part = [&](const Tensor& x) {
    return rows.Of(x).to(torch::kBFloat16).to(torch::kCUDA);
  };
  return {part(problem.q), part(problem.k), part(problem.v), part(problem.d_out)};
}

HelperInputs Random(int64_t tokens) {
  const auto random = [&](int heads) {
    return torch::randn({tokens, heads, kGpuHeadDim},
                        torch::device(torch::kCUDA).dtype(torch::kBFloat16));
  };
  return {random(kGpuHeads), random(kGpuKvHeads), random(kGpuKvHeads), random(kGpuHeads)};
}

// Until all ranks are here, and this one's GPU is idle with nothing of the inputs in its L2 cache.
void Meet(DeviceCommunicator& all) {
  const auto bytes = torch::device(torch::kCUDA).dtype(torch::kByte);
  torch::empty({kFlushedBytes}, bytes).zero_();
  const torch::Tensor one = torch::zeros({1}, bytes.dtype(torch::kFloat));
  const auto met = all.AllReduceSum(comm::Channel::kControl, one.mutable_data_ptr(), 1,
                                    comm::ElementType::kFloat32, Stream());
  Check(met.status());
  if (*met != nullptr) Check((*met)->Order(Stream()));
  c10::cuda::getCurrentCUDAStream().synchronize();
}

attention::RingBytes BytesOf(const attention::AttentionStats& stats) {
  return {.sent = stats.ring_bytes.sent + stats.head_bytes,
          .whole = stats.ring_bytes.whole + stats.head_bytes};
}

// A rank's links, which take longer to make than most cells to measure.
struct Links {
  DeviceCommunicator& all;
  std::unique_ptr<DeviceCommunicator> ring, heads;
};

Links Connect(const Scheme& scheme, DeviceCommunicator& all) {
  auto ring = all.Split(scheme.RingOf(all.rank()));
  Check(ring.status());
  Links links{.all = all, .ring = *std::move(ring), .heads = nullptr};
  if (scheme.head_ranks > 1) {
    auto heads = all.Split(scheme.HeadsOf(all.rank()));
    Check(heads.status());
    links.heads = *std::move(heads);
  }
  return links;
}

// As RunRank.
void RunHelpers(const MaskedSequence& sequence, const Setting& setting, const Problem* problem,
                int repetitions, DeviceCommunicator& all, RankRun* run, Results* results) {
  const int tile = TileOf(setting.choice);
  const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
  const auto planning = std::chrono::steady_clock::now();
  const auto intervals = IntervalsOf(sequence.MaskOf(setting.mask),
                                     static_cast<int32_t>(sequence.tokens), sequence.documents);
  Check(intervals.status());
  const auto device = CreateGpuHelperDevice(
      AskFor(sequence, setting.mask), *intervals, [&] { Meet(all); }, &all);
  run->plan_ms = {MillisecondsSince(planning)};
  const RankRows rows(setting.scheme, all.rank(), sequence.tokens, tile);
  const auto found =
      RunHelperRank(problem == nullptr ? Random(rows.count()) : PartOf(*problem, rows), *intervals,
                    kWarmUps, repetitions, *device, run);
  Check(found.status());
  if (results != nullptr) rows.Put(found->out, found->dq, found->dk, found->dv, results);
  Meet(all);  // nobody leaves while others' transfers run
}

// Throws c10::Error. `results`: null where nobody looks at them.
void RunRank(const MaskedSequence& sequence, const Setting& setting, const Problem* problem,
             int repetitions, const Links& links, RankRun* run, Results* results) {
  const auto& [mask, choice, scheme] = setting;
  if (scheme.has_helpers) {
    RunHelpers(sequence, setting, problem, repetitions, links.all, run, results);
    return;
  }
  const Asked asked = AskFor(sequence, mask);
  const int tile = TileOf(choice);
  const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
  DeviceCommunicator& all = links.all;
  const auto ranks = attention::CreateCudaRingAttention(
      scheme.Options(asked, choice, sequence.tokens, tile), links.ring.get(), links.heads.get());
  Check(ranks.status());
  const RankRows rows(scheme, all.rank(), sequence.tokens, tile);
  const auto [q, k, v, d_out] = problem == nullptr ? Random(rows.count()) : PartOf(*problem, rows);
  for (int repetition = -kWarmUps; repetition < repetitions; ++repetition) {
    auto start = std::chrono::steady_clock::now();
    Check(SetMask(asked, sequence.tokens, ranks->get()));
    const double mask_ms = MillisecondsSince(start);
    Meet(all);
    start = std::chrono::steady_clock::now();
    const attention::AttentionOutput forward = (*ranks)->Forward(/*layer=*/0, q, k, v);
    c10::cuda::getCurrentCUDAStream().synchronize();
    const double forward_ms = MillisecondsSince(start);
    const attention::AttentionStats stats = (*ranks)->TakeStats();
    run->tiles = static_cast<double>(stats.TotalTiles());
    const double index_ms = 1e3 * stats.seconds.index;
    if (repetition >= 0) run->forward_ms.push_back(forward_ms - index_ms);
    if (repetition >= 0) run->plan_ms.push_back(mask_ms + index_ms);
    run->forward_bytes = BytesOf(stats);
    Meet(all);
    start = std::chrono::steady_clock::now();
    const attention::AttentionGradients gradients =
        forward.record->Backward(q, k, v, forward.out, forward.lse, d_out);
    c10::cuda::getCurrentCUDAStream().synchronize();
    if (repetition >= 0) run->backward_ms.push_back(MillisecondsSince(start));
    run->backward_bytes = BytesOf((*ranks)->TakeStats());
    if (results == nullptr) continue;
    rows.Put(forward.out, gradients.dq, gradients.dk, gradients.dv, results);
  }
  Meet(all);  // nobody leaves while others' transfers run
}

using Body = std::function<void(DeviceCommunicator&)>;

// `body` on a thread for each rank; a GPU each if there are as many.
void RunOnGpus(int ranks, int gpus, const Body& body) {
  if (ranks > gpus || ranks == 1) return comm::testing::RunDeviceRanks(ranks, body);
  comm::testing::RunRanks(comm::testing::LocalCommunicators(ranks), [&](comm::Communicator& host) {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(host.rank()));
    const auto device = comm::CreateNcclCommunicator({.device = host.rank()}, &host);
    Check(device.status());
    body(**device);
    host.Barrier().IgnoreError();
  });
}

// What the GPUs hold, MiB, the fullest of them.
double HeldMib(int gpus) {
  size_t most = 0;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(gpu));
    size_t free = 0, total = 0;
    if (cudaMemGetInfo(&free, &total) == cudaSuccess) most = std::max(most, total - free);
  }
  return static_cast<double>(most) / 1048576;
}

void RoundToBf16(Tensor* tensor) {
  AsTorch(*tensor).copy_(AsTorch(*tensor).to(torch::kBFloat16));
}

// Problems by which keys are told apart, and what ranks find of them.
struct Probes {
  std::vector<Problem> problems;
  std::vector<Results> results;

  explicit Probes(const Problem& problem) {
    for (int64_t first = 0; first < problem.tokens; first += kHeadDim) {
      problems.push_back(VisitedPairs::Probe(problem, first));
      results.emplace_back(problem.tokens);
    }
  }
  // Each rank calls it. Throws c10::Error.
  void Run(const Setting& setting, const Links& links) {
    RankRun ignored;
    for (size_t i = 0; i < problems.size(); ++i) {
      RunRank(problems[i], setting, &problems[i], /*repetitions=*/0, links, &ignored, &results[i]);
    }
  }
  VisitedPairs Visited() const {
    VisitedPairs visited(problems.front().tokens);
    for (size_t i = 0; i < results.size(); ++i) {
      visited.Learn(results[i].out, static_cast<int64_t>(i) * kHeadDim);
    }
    return visited;
  }
};

}  // namespace

struct GpuRingCells::Checked {
  Problem problem;          // of values that bf16 holds
  std::vector<char> shown;  // by the mask, [tokens, tokens]
  VisitedPairs visited;     // of a choice
  kernels::reference::testing::MaskedAttention expected;
};

const GpuRingCells::Checked& GpuRingCells::CheckedOf(const Setting& setting, int64_t tokens) {
  const auto& [mask, choice, scheme] = setting;
  std::shared_ptr<const Checked>& known = checked_[{mask, choice.pattern, choice.density, tokens}];
  if (known != nullptr) return *known;
  Problem problem(tokens, kSeed, lengths_);
  for (Tensor* x : {&problem.q, &problem.k, &problem.v, &problem.d_out}) RoundToBf16(x);
  VisitedPairs visited(tokens);
  kernels::reference::testing::Visible is_visited;
  if (!choice.is_all()) {
    const Setting alone = {mask, choice, SchemesOn(1).front()};
    Probes probes(problem);
    RunOnGpus(/*ranks=*/1, gpus_,
              [&](DeviceCommunicator& one) { probes.Run(alone, Connect(alone.scheme, one)); });
    is_visited = visited = probes.Visited();
  }
  const kernels::Mask of = problem.MaskOf(mask);
  auto expected = problem.Expected(of, is_visited);
  known = std::make_shared<const Checked>(
      Checked{problem, problem.Shown(of), std::move(visited), std::move(expected)});
  return *known;
}

absl::Status GpuRingCells::Fill(const Setting& setting, int repetitions, std::vector<Cell>* cells) {
  const Scheme& scheme = setting.scheme;
  const Checked& checked = CheckedOf(setting, CheckedTokens(setting));
  const MaskedSequence sequence(cells->front().tokens, kSeed, lengths_);
  std::vector<RankRun> few(scheme.ranks()), runs(scheme.ranks());
  Results results(checked.problem.tokens);
  Probes probes(checked.problem);
  double held_mib = 0;
  absl::Notification emptied;  // frees memory of all GPUs, each of which has to be idle for that
  RunOnGpus(scheme.ranks(), gpus_, [&](DeviceCommunicator& all) {
    // What fails in a rank ends the others' transfers, but no wait for this one.
    const absl::Cleanup release = [&] {
      if (all.rank() == 0 && !emptied.HasBeenNotified()) emptied.Notify();
    };
    const Links links = Connect(scheme, all);
    RunRank(checked.problem, setting, &checked.problem, /*repetitions=*/1, links, &few[all.rank()],
            &results);
    if (!setting.choice.is_all()) probes.Run(setting, links);
    if (all.rank() == 0) {
      c10::cuda::CUDACachingAllocator::emptyCache();
      emptied.Notify();
    }
    emptied.WaitForNotification();
    RunRank(sequence, setting, nullptr, repetitions, links, &runs[all.rank()], nullptr);
    if (all.rank() == 0) held_mib = HeldMib(gpus_);
  });
  double error = LargestError(checked.expected, results.out, results.dq, results.dk, results.dv);
  if (!setting.choice.is_all()) {
    const VisitedPairs visited = probes.Visited();
    if (visited != checked.visited || !visited.IsWithin(checked.shown)) {
      error = std::numeric_limits<double>::infinity();
    }
  }
  ASSIGN_OR_RETURN(const auto rows,
                   IntervalsOf(sequence.MaskOf(setting.mask), static_cast<int32_t>(sequence.tokens),
                               sequence.documents));
  for (Cell& cell : *cells) {
    FillFrom(runs, &cell);
    cell.share = ShareOf(runs, setting, rows, kGpuHeads, TileOf(setting.choice));
    cell.peak_mib = held_mib;
    cell.error = error;
    cell.tolerance = kTolerance;
  }
  return absl::OkStatus();
}

std::vector<Cell> GpuRingCells::Measure(const Setting& setting, int64_t tokens, int repetitions) {
  std::vector<Cell> cells = EmptyCells(setting, tokens);
  std::string note = "unsupported";
  const int tile = TileOf(setting.choice);
  if (IsPossible(setting, {CheckedTokens(setting), kSeed, lengths_}, tile) &&
      IsPossible(setting, {tokens, kSeed, lengths_}, tile)) {
    try {
      note = std::string(Fill(setting, repetitions, &cells).message());
    } catch (const c10::OutOfMemoryError&) {
      note = "out of memory";
    } catch (const c10::Error& error) {
      note = error.what_without_backtrace();
    }
  }
  for (Cell& cell : cells) cell.note = note;
  return cells;
}

}  // namespace ringleader::bench
