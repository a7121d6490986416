// The engine's device on a CPU: it computes in fp32, bit for bit the same in every run.
#include <ATen/Parallel.h>
#include <sys/utsname.h>

#include <chrono>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/model/token_ops/cpu_token_ops.h"
#include "worker/optim/cpu_shard_device.h"
#include "worker/trainer/engine/engine_device.h"
#include "worker/trainer/engine/machine_memory.h"
#include "worker/trainer/engine/model_source.h"

namespace ringleader::trainer {
namespace {

class CpuDevice : public EngineDevice {
 public:
  CpuDevice(const TrainingJob& job, comm::Communicator& world)
      : job_(job), world_(world), token_ops_(model::NewCpuTokenOps(job.threads)) {}
  absl::Status SetUp();

  std::string Describe() const override {
    return absl::StrFormat("CPU, fp32, %d threads each", job_.threads);
  }
  torch::ScalarType type() const override { return torch::kFloat; }
  bool is_host() const override { return true; }
  absl::StatusOr<model::MemoryLimits> FreeMemory() override {
    ASSIGN_OR_RETURN(const int64_t share, HostMemoryShare(job_.ranks_per_node));
    return model::MemoryLimits{.device = share};
  }
  const model::TokenOps& token_ops() const override { return *token_ops_; }
  attention::ContextAttention& attention() override { return *attention_; }
  absl::Status SetAttention(const patterns::AttentionOptions& options) override;
  absl::StatusOr<std::unique_ptr<attention::ContextAttention>> MakeRing(
      const patterns::AttentionOptions& options) override {
    return attention::CreateCpuRingAttention(options, ring_.get(), heads_.get());
  }
  absl::StatusOr<std::unique_ptr<attention::ContextAttention>> MakeAttentionAlone(
      const patterns::AttentionOptions& options) override {
    if (alone_ == nullptr) {
      ASSIGN_OR_RETURN(alone_, world_.Split({world_.rank()}));
    }
    return attention::CreateCpuRingAttention(options, alone_.get());
  }
  absl::StatusOr<std::vector<double>> Exchange(int partner, size_t bytes, int times) override;
  balance::MachineKind Machine() const override;
  absl::StatusOr<std::unique_ptr<optim::ShardDevice>> MakeShardDevice() override {
    return std::make_unique<optim::CpuShardDevice>(world_, job_.threads);
  }
  absl::StatusOr<model::HostCopies*> PinHostMemory(int64_t, int64_t) override {
    return absl::InternalError("a CPU rank has no second memory to keep activations in");
  }
  torch::Tensor Upload(const std::vector<int64_t>& values) override {
    return torch::from_blob(const_cast<int64_t*>(values.data()),
                            {static_cast<int64_t>(values.size())}, torch::kInt64);
  }
  void Begin(Interval interval) override { TimerOf(interval).start = Clock::now(); }
  void End(Interval interval) override {
    Timer& timer = TimerOf(interval);
    timer.seconds = std::chrono::duration<double>(Clock::now() - timer.start).count();
  }
  double TakeSeconds(Interval interval) override {
    return std::exchange(TimerOf(interval).seconds, 0.0);
  }
  double TakeOffloadSeconds() override { return 0.0; }
  uint64_t PeakBytes() const override { return PeakMemoryBytes(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Timer {
    Clock::time_point start = {};
    double seconds = 0.0;
  };
  Timer& TimerOf(Interval interval) { return timers_[interval == Interval::kModel ? 0 : 1]; }

  const TrainingJob& job_;
  comm::Communicator& world_;
  std::unique_ptr<comm::Communicator> ring_;   // RingRanks()
  std::unique_ptr<comm::Communicator> heads_;  // HeadRanks(); null: this rank has all heads
  std::unique_ptr<comm::Communicator> alone_;  // this rank; null until it is needed
  std::unique_ptr<attention::ContextAttention> attention_;
  const std::unique_ptr<model::TokenOps> token_ops_;
  Timer timers_[2];
};

absl::Status CpuDevice::SetUp() {
  at::set_num_threads(job_.threads);
  ASSIGN_OR_RETURN(ring_, world_.Split(RingRanks(job_)));
  if (job_.attention.head_ranks > 1) {
    ASSIGN_OR_RETURN(heads_, world_.Split(HeadRanks(job_)));
  }
  return SetAttention(job_.attention);
}

absl::Status CpuDevice::SetAttention(const patterns::AttentionOptions& options) {
  attention_.reset();
  ASSIGN_OR_RETURN(attention_, AttentionOf(options, job_.ring_rank(), *this));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> CpuDevice::Exchange(int partner, size_t bytes, int times) {
  const std::vector<char> sent(bytes);
  std::vector<char> received(bytes);
  std::vector<double> seconds;
  for (int i = 0; i < times; ++i) {
    const Clock::time_point start = Clock::now();
    RETURN_IF_ERROR(world_
                        .SendReceive(comm::Channel::kKvInner, sent.data(), bytes, partner,
                                     received.data(), bytes, partner)
                        ->Wait());
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return seconds;
}

balance::MachineKind CpuDevice::Machine() const {
  balance::MachineKind machine = {.device = absl::StrFormat("cpu, %d threads", job_.threads),
                                  .build = MeasuringBuild()};
  utsname system{};
  if (uname(&system) == 0) machine.driver = absl::StrCat(system.sysname, " ", system.release);
  // Virtual machines have no such file.
  std::ifstream governor("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
  std::getline(governor, machine.clocks);
  return machine;
}

}  // namespace

absl::StatusOr<std::unique_ptr<EngineDevice>> CreateCpuDevice(const TrainingJob& job,
                                                              comm::Communicator& world,
                                                              Host& /*host*/) {
  auto device = std::make_unique<CpuDevice>(job, world);
  RETURN_IF_ERROR(device->SetUp());
  return device;
}

}  // namespace ringleader::trainer
