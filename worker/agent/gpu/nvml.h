// NVIDIA's management library (libnvidia-ml.so.1), which comes with the driver and is opened while
// the program runs. Any call may hang in the driver: GpuMonitor keeps them to a thread of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ringleader/v1/node.pb.h"
#include "worker/agent/gpu/nvml_abi.h"

namespace ringleader::agent {

// What one GPU does now; a figure that its driver does not give is absent.
struct GpuSample {
  std::optional<double> utilization;  // share of the time in which a kernel ran, 0 to 1
  std::optional<uint64_t> memory_used_bytes;
  std::optional<uint64_t> memory_total_bytes;
  std::optional<double> power_watts;
  std::optional<double> temperature_celsius;
  std::optional<double> sm_hertz;
  std::optional<double> memory_hertz;
  std::optional<uint64_t> throttle;  // bits of nvml::Throttle
  // Memory errors since the driver was loaded or the GPU was reset.
  std::optional<uint64_t> corrected_errors;
  std::optional<uint64_t> uncorrected_errors;
  std::optional<bool> row_remap_failed;
  bool lost = false;  // it does not answer any more: it has fallen off the bus
};

struct XidEvent {
  size_t gpu = 0;  // by its place in Nvml::gpus()
  uint64_t xid = 0;
};

// One thread uses an object at a time.
class Nvml {
 public:
  // Opens the library and lists the GPUs. NOT_FOUND: there is no such library, hence no driver;
  // UNAVAILABLE names the function that it lacks, or that failed, and how.
  static absl::StatusOr<std::unique_ptr<Nvml>> Open(const std::string& library);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // In the order of their bus addresses, as nvidia-smi numbers them, but for those that had fallen
  // off the bus before.
  const std::vector<v1::Gpu>& gpus() const { return gpus_; }
  GpuSample Sample(size_t gpu) const;
  // The next XID error that the driver reports on any GPU; none within `patience`. UNAVAILABLE
  // where the driver tells of none: then it returns at once.
  absl::StatusOr<std::optional<XidEvent>> AwaitXid(absl::Duration patience) const;

 private:
  explicit Nvml(void* library) : library_(library) {}

  absl::Status FindFunctions(const std::string& library);
  absl::Status ListGpus();
  void ListenForXids();
  absl::Status Check(nvml::Return result, const char* what) const;

  void* const library_;
  nvml::Functions call_ = {};
  bool initialized_ = false;
  std::vector<nvml::Device> devices_;
  std::vector<v1::Gpu> gpus_;
  nvml::EventSet events_ = nullptr;  // null: the driver tells of no XIDs
};

}  // namespace ringleader::agent
