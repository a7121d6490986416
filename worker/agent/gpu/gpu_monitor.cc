#include "worker/agent/gpu/gpu_monitor.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "base/boot_clock.h"
#include "base/wait/timed_wait.h"

namespace ringleader::agent {
namespace {

// How soon a monitor that is told to end notices it, unless the driver hangs.
constexpr absl::Duration kEndCheck = absl::Milliseconds(200);
// For a call that hangs nobody waits longer at the end.
constexpr absl::Duration kFarewell = absl::Seconds(2);

// XIDs (NVIDIA's "XID Errors" guide) after which the GPU computes wrongly or not at all until it is
// reset. All others may be a program's own fault.
const std::map<uint64_t, const char*>& FatalXids() {
  static const auto* const kXids = new std::map<uint64_t, const char*>{
      {48, "uncorrectable memory error"},
      {64, "a faulty memory row could not be replaced"},
      {79, "the GPU has fallen off the bus"},
      {94, "uncorrectable memory error, contained"},
      {95, "uncorrectable memory error, not contained"},
      {140, "uncorrectable memory error"},
  };
  return *kXids;
}

}  // namespace

std::string FaultOf(const WatchedGpu& watched) {
  const GpuSample& sample = watched.sample;
  if (sample.lost) return "the driver says that it is lost: it has fallen off the bus";
  if (sample.uncorrected_errors.value_or(0) > 0) {
    return absl::StrFormat("%d uncorrectable memory errors since the driver was loaded",
                           *sample.uncorrected_errors);
  }
  if (sample.row_remap_failed.value_or(false)) return "a faulty memory row could not be replaced";
  for (const auto& [xid, times] : watched.xids) {
    const auto fatal = FatalXids().find(xid);
    if (fatal != FatalXids().end()) return absl::StrFormat("XID %d: %s", xid, fatal->second);
  }
  return "";
}

// What the thread and its owner share. The thread may outlive the owner.
class GpuMonitor::Shared {
 public:
  void Run(const GpuMonitorOptions& options) {
    const absl::StatusOr<std::unique_ptr<Nvml>> nvml = Nvml::Open(options.library);
    if (nvml.ok()) {
      SetListed((*nvml)->gpus());
      while (!stopping() && !(*nvml)->gpus().empty()) {
        for (size_t gpu = 0; gpu < (*nvml)->gpus().size(); ++gpu) {
          Put(gpu, (*nvml)->Sample(gpu));
        }
        NoteRound();
        AwaitNextRound(**nvml, options.interval);
      }
    } else if (!absl::IsNotFound(nvml.status())) {
      spdlog::warn("GPUs are not watched: {}", std::string(nvml.status().message()));
    }
    absl::MutexLock lock(&mutex_);
    ended_ = true;
  }

  void Stop() {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    AwaitFor(mutex_, absl::Condition(&ended_), kFarewell);
  }

  std::vector<v1::Gpu> List(absl::Duration patience) const {
    absl::MutexLock lock(&mutex_);
    const auto known = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return sampled_ || ended_; };
    if (!AwaitFor(mutex_, absl::Condition(&known), patience)) {
      spdlog::warn("the GPU driver has not answered within {}", absl::FormatDuration(patience));
    }
    std::vector<v1::Gpu> gpus;
    for (const WatchedGpu& watched : gpus_) gpus.push_back(watched.gpu);
    return gpus;
  }

  std::vector<WatchedGpu> Watched() const {
    absl::MutexLock lock(&mutex_);
    return gpus_;
  }

  absl::Duration SampleAge() const {
    absl::MutexLock lock(&mutex_);
    return BootNow() - last_round_;
  }

 private:
  bool stopping() const {
    absl::MutexLock lock(&mutex_);
    return stopping_;
  }

  void SetListed(const std::vector<v1::Gpu>& gpus) {
    absl::MutexLock lock(&mutex_);
    for (const v1::Gpu& gpu : gpus) gpus_.push_back({.gpu = gpu, .sample = {}, .xids = {}});
  }

  void Put(size_t gpu, const GpuSample& sample) {
    absl::MutexLock lock(&mutex_);
    gpus_[gpu].sample = sample;
  }

  void NoteRound() {
    absl::MutexLock lock(&mutex_);
    last_round_ = BootNow();
    sampled_ = true;
  }

  // Until the interval is over, or an XID error says that something has happened.
  void AwaitNextRound(const Nvml& nvml, absl::Duration interval) {
    const absl::Time end = BootNow() + interval;
    while (!stopping() && BootNow() < end) {
      const absl::Duration patience = std::min(kEndCheck, end - BootNow());
      const absl::StatusOr<std::optional<XidEvent>> event = nvml.AwaitXid(patience);
      if (!event.ok()) {
        absl::MutexLock lock(&mutex_);
        AwaitFor(mutex_, absl::Condition(&stopping_), end - BootNow());
      } else if (event->has_value()) {
        absl::MutexLock lock(&mutex_);
        WatchedGpu& watched = gpus_[(*event)->gpu];
        ++watched.xids[(*event)->xid];
        spdlog::warn("{}: the driver reports XID {}", watched.gpu.uuid(), (*event)->xid);
        return;
      }
    }
  }

  mutable absl::Mutex mutex_;
  std::vector<WatchedGpu> gpus_ ABSL_GUARDED_BY(mutex_);
  bool sampled_ ABSL_GUARDED_BY(mutex_) = false;  // each GPU once
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time last_round_ ABSL_GUARDED_BY(mutex_) = BootNow();
};

GpuMonitor::GpuMonitor(const GpuMonitorOptions& options) : shared_(std::make_shared<Shared>()) {
  std::thread([shared = shared_, options] { shared->Run(options); }).detach();
}

GpuMonitor::~GpuMonitor() {
  shared_->Stop();
}

std::vector<v1::Gpu> GpuMonitor::List(absl::Duration patience) const {
  return shared_->List(patience);
}
std::vector<WatchedGpu> GpuMonitor::Watched() const {
  return shared_->Watched();
}
absl::Duration GpuMonitor::SampleAge() const {
  return shared_->SampleAge();
}

std::map<std::string, std::string> GpuMonitor::Faults() const {
  std::map<std::string, std::string> faults;
  for (const WatchedGpu& watched : Watched()) {
    std::string fault = FaultOf(watched);
    if (!fault.empty()) faults[watched.gpu.uuid()] = std::move(fault);
  }
  return faults;
}

}  // namespace ringleader::agent
