// attention_ring_bench [--csv FILE] [--commit NAME] [--tokens N] [--schedule NAME]
// [--nccl_blocks N]: one layer of ring attention on 4 ranks, by schedule and pattern, in
// milliseconds a layer. Forward and backward are all in, of the slowest rank; index, kernels and
// exposed communication (waiting for transfers, and for ranks that are behind) are means over
// ranks.
//
// With 4 GPUs every rank has its own and they speak NCCL. On fewer the 4 ranks share one GPU, and
// the figures are a quarter of the time that all of them take: what a rank computes, without the
// cost of transfers between GPUs; index and waits then mean little, ranks run between each other.
#include <c10/cuda/CUDAGuard.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/bench/bench_report.h"
#include "kernels/ops/cuda_call.h"
#include "worker/attention/cuda/cuda_ring_attention.h"
#include "worker/comm/nccl/nccl_communicator.h"
#include "worker/comm/testing/local_communicator.h"
#include "worker/comm/testing/local_device_communicator.h"

namespace ringleader::attention {
namespace {

constexpr int kRanks = 4, kHeads = 16, kKvHeads = 2, kHeadDim = 128;
constexpr int kWarmUps = 2, kLayers = 6;

struct Case {
  std::string schedule, pattern;
  patterns::AttentionOptions options;
};

// Milliseconds a layer: of the slowest rank all in, and the mean over ranks by phase.
struct Figures {
  double forward = 0, backward = 0;
  AttentionSeconds phases;
  double density = 0, verticals = 0, slashes = 0;
};

// Keeps the device busy for tens of milliseconds, so that what follows is enqueued before it can
// run, as in a training step.
void Occupy() {
  const torch::Tensor x =
      torch::ones({8192, 8192}, torch::device(torch::kCUDA).dtype(torch::kBFloat16));
  for (int i = 0; i < 40; ++i) x.mm(x);
}

// Device seconds of what `body` enqueues.
double Measure(const std::function<void()>& body) {
  const cudaStream_t stream = kernels::ops::Stream();
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  Occupy();
  cudaEventRecord(begin, stream);
  body();
  cudaEventRecord(end, stream);
  cudaEventSynchronize(end);
  float milliseconds = 0.0f;
  cudaEventElapsedTime(&milliseconds, begin, end);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return milliseconds * 1e-3;
}

// `layers` layers forward, then backward; seconds of either.
std::pair<double, double> RunLayers(ContextAttention& attention, const torch::Tensor& q,
                                    const torch::Tensor& k, const torch::Tensor& v,
                                    const torch::Tensor& d_out, int layers,
                                    comm::Communicator& host) {
  std::vector<AttentionOutput> outputs;
  kernels::ops::Check(host.Barrier());
  const double forward = Measure([&] {
    for (int layer = 0; layer < layers; ++layer) {
      outputs.push_back(attention.Forward(layer, q, k, v));
    }
  });
  kernels::ops::Check(host.Barrier());
  const double backward = Measure([&] {
    for (int layer = layers - 1; layer >= 0; --layer) {
      const AttentionOutput& o = outputs[layer];
      o.record->Backward(q, k, v, o.out, o.lse, d_out);
    }
  });
  return {forward, backward};
}

void RunRank(const Case& c, int64_t local_tokens, double share, comm::Communicator& host,
             comm::DeviceCommunicator& device, Figures& figures, std::mutex& mutex) {
  const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
  auto attention = CreateCudaRingAttention(c.options, &device);
  kernels::ops::Check(attention.status());
  torch::manual_seed(1 + device.rank());
  const auto random = [&](int heads) {
    return torch::randn({local_tokens, heads, kHeadDim}, torch::device(torch::kCUDA))
        .to(torch::kBFloat16);
  };
  const torch::Tensor q = random(kHeads), k = random(kKvHeads), v = random(kKvHeads),
                      d_out = random(kHeads);
  RunLayers(**attention, q, k, v, d_out, kWarmUps, host);
  (*attention)->TakeStats();
  const auto [forward, backward] = RunLayers(**attention, q, k, v, d_out, kLayers, host);
  const AttentionStats stats = (*attention)->TakeStats();
  const double milliseconds = 1e3 / kLayers * share;
  const std::lock_guard lock(mutex);
  figures.forward = std::max(figures.forward, forward * milliseconds);
  figures.backward = std::max(figures.backward, backward * milliseconds);
  for (double AttentionSeconds::*phase :
       {&AttentionSeconds::index, &AttentionSeconds::forward, &AttentionSeconds::backward,
        &AttentionSeconds::exposed_communication}) {
    figures.phases.*phase += stats.seconds.*phase * milliseconds / kRanks;
  }
  figures.density = stats.layers[0].density;
  figures.verticals = stats.layers[0].verticals;
  figures.slashes = stats.layers[0].slashes;
}

// Whether every rank has a GPU.
bool HaveGpus() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices >= kRanks;
}

std::vector<Figures> RunCases(const std::vector<Case>& cases, int64_t local_tokens,
                              comm::NcclOptions nccl) {
  std::vector<Figures> figures_by_case(cases.size());
  std::mutex mutex;
  const bool shared = !HaveGpus();
  const auto devices = comm::testing::LocalDeviceCommunicators(shared ? kRanks : 0);
  comm::testing::RunRanks(kRanks, [&](comm::Communicator& host) {
    const int gpu = shared ? 0 : host.rank();
    cudaSetDevice(gpu);
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(gpu));
    std::unique_ptr<comm::DeviceCommunicator> owned;
    if (!shared) {
      comm::NcclOptions options = nccl;
      options.device = gpu;
      auto created = comm::CreateNcclCommunicator(options, &host);
      kernels::ops::Check(created.status());
      owned = *std::move(created);
    }
    comm::DeviceCommunicator& device = shared ? *devices[host.rank()] : *owned;
    for (size_t i = 0; i < cases.size(); ++i) {
      RunRank(cases[i], local_tokens, shared ? 1.0 / kRanks : 1.0, host, device, figures_by_case[i],
              mutex);
    }
  });
  return figures_by_case;
}

// Of one schedule; empty: of all.
std::vector<Case> Cases(const std::string& schedule) {
  // Random keys make random diagonals, of which this many are a twentieth of the causal area.
  const patterns::AttentionOptions diagonals{.pattern = patterns::Pattern::kVerticalSlash,
                                             .select = patterns::Select::kTopK,
                                             .budget = {.max_verticals = 0, .max_slashes = 200},
                                             .sink_tokens = 0};
  patterns::AttentionOptions columns = diagonals;
  columns.budget.max_verticals = 2621;
  columns.budget.max_slashes = 160;
  std::vector<Case> cases;
  for (const auto& [name, ring] :
       {std::pair{"flat", ring::RingShape{ring::RingKind::kFlat, kRanks, 1}},
        std::pair{"hierarchical", ring::RingShape{ring::RingKind::kHierarchical, 2, 2}},
        std::pair{"all-gather", ring::RingShape{ring::RingKind::kAllGather, kRanks, 1}}}) {
    if (!schedule.empty() && schedule != name) continue;
    cases.push_back({name, "diagonals", diagonals});
    cases.back().options.ring = ring;
    cases.push_back({name, "columns and diagonals", columns});
    cases.back().options.ring = ring;
  }
  return cases;
}

int Main(int argc, char** argv) {
  const kernels::bench::Flags flags = kernels::bench::ParseFlags(argc, argv);
  std::string schedule;
  int64_t tokens = 524288;
  comm::NcclOptions nccl;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--tokens") == 0) tokens = std::atoll(argv[i + 1]);
    if (std::strcmp(argv[i], "--schedule") == 0) schedule = argv[i + 1];
    if (std::strcmp(argv[i], "--nccl_blocks") == 0) nccl.kv_blocks = std::atoi(argv[i + 1]);
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
      !kernels::ops::LoadTorchCuda().ok()) {
    std::printf("attention_ring_bench: SKIPPED, no GPU or no LibTorch with CUDA\n");
    return 0;
  }
  kernels::bench::Report report(
      flags, {"schedule", "pattern", "tokens", "gpus", "density", "columns", "diagonals",
              "forward_ms", "backward_ms", "index_ms", "forward_kernels_ms", "backward_kernels_ms",
              "exposed_ms", "exposed_share"});
  const auto ms = [](double value) { return absl::StrFormat("%.3f", value); };
  const std::vector<Case> cases = Cases(schedule);
  const std::vector<Figures> figures = RunCases(cases, tokens / kRanks, nccl);
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    const Figures& f = figures[i];
    const double exposed = f.phases.exposed_communication;
    report.Add({c.schedule, c.pattern, absl::StrFormat("%d", tokens),
                absl::StrFormat("%d", HaveGpus() ? kRanks : 1), absl::StrFormat("%.4f", f.density),
                absl::StrFormat("%.0f", f.verticals), absl::StrFormat("%.0f", f.slashes),
                ms(f.forward), ms(f.backward), ms(f.phases.index), ms(f.phases.forward),
                ms(f.phases.backward), ms(exposed),
                absl::StrFormat("%.4f", exposed / (f.forward + f.backward))});
  }
  return 0;
}

}  // namespace
}  // namespace ringleader::attention

int main(int argc, char** argv) {
  return ringleader::attention::Main(argc, argv);
}
