// Watches the GPUs of this machine: what they do, and which of them must take no trainers.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ringleader/v1/node.pb.h"
#include "worker/agent/gpu/nvml.h"

namespace ringleader::agent {

struct GpuMonitorOptions {
  std::string library = "libnvidia-ml.so.1";
  absl::Duration interval = absl::Seconds(5);
};

// One GPU as it was last seen.
struct WatchedGpu {
  v1::Gpu gpu;
  GpuSample sample;
  std::map<uint64_t, uint64_t> xids;  // XID errors since this program started: how often each came
};

// Why a GPU must take no trainers: it has reported uncorrectable errors since it was reset. Empty:
// it is well.
std::string FaultOf(const WatchedGpu& watched);

// Thread-safe. The driver may hang: every call into it is made on one thread, for which nobody
// waits longer than he says. A machine without a driver has no GPUs.
class GpuMonitor {
 public:
  explicit GpuMonitor(const GpuMonitorOptions& options);
  // Leaves the thread behind if it hangs in the driver.
  ~GpuMonitor();
  GpuMonitor(const GpuMonitor&) = delete;
  GpuMonitor& operator=(const GpuMonitor&) = delete;

  // The GPUs in nvidia-smi's order, once each has been looked at, or after `patience` those that
  // the driver has listed so far.
  std::vector<v1::Gpu> List(absl::Duration patience) const;
  std::vector<WatchedGpu> Watched() const;
  // How long ago the driver last answered for all GPUs.
  absl::Duration SampleAge() const;
  // {UUID, why} of the GPUs that must take no trainers.
  std::map<std::string, std::string> Faults() const;

 private:
  class Shared;

  const std::shared_ptr<Shared> shared_;
};

}  // namespace ringleader::agent
