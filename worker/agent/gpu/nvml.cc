#include "worker/agent/gpu/nvml.h"

#include <dlfcn.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader::agent {
namespace {

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Nvml>> Nvml::Open(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return absl::NotFoundError(dlerror());
  std::unique_ptr<Nvml> nvml(new Nvml(handle));
  RETURN_IF_ERROR(nvml->FindFunctions(library));
  RETURN_IF_ERROR(nvml->Check(nvml->call_.init(), "nvmlInit_v2"));
  nvml->initialized_ = true;
  RETURN_IF_ERROR(nvml->ListGpus());
  nvml->ListenForXids();
  return nvml;
}

Nvml::~Nvml() {
  if (events_ != nullptr) call_.free_events(events_);
  if (initialized_) call_.shutdown();
  dlclose(library_);
}

absl::Status Nvml::FindFunctions(const std::string& library) {
  const char* missing = nullptr;
  const auto required = [&](const char* name, auto* function) {
    if (!Find(library_, name, function)) missing = name;
  };
  required("nvmlInit_v2", &call_.init);
  required("nvmlShutdown", &call_.shutdown);
  required("nvmlErrorString", &call_.error_string);
  required("nvmlDeviceGetCount_v2", &call_.get_count);
  required("nvmlDeviceGetHandleByIndex_v2", &call_.get_handle);
  required("nvmlDeviceGetUUID", &call_.get_uuid);
  required("nvmlDeviceGetName", &call_.get_name);
  required("nvmlDeviceGetMemoryInfo", &call_.get_memory);
  if (missing != nullptr) {
    return absl::UnavailableError(
        absl::StrFormat("%s has no %s: its driver is too old", library, missing));
  }
  Find(library_, "nvmlDeviceGetUtilizationRates", &call_.get_utilization);
  Find(library_, "nvmlDeviceGetPowerUsage", &call_.get_power);
  Find(library_, "nvmlDeviceGetTemperature", &call_.get_temperature);
  Find(library_, "nvmlDeviceGetClockInfo", &call_.get_clock);
  Find(library_, "nvmlDeviceGetCurrentClocksThrottleReasons", &call_.get_throttle);
  Find(library_, "nvmlDeviceGetTotalEccErrors", &call_.get_ecc_errors);
  Find(library_, "nvmlDeviceGetRemappedRows", &call_.get_remapped_rows);
  const bool events = Find(library_, "nvmlEventSetCreate", &call_.create_events) &&
                      Find(library_, "nvmlDeviceRegisterEvents", &call_.register_events) &&
                      Find(library_, "nvmlEventSetWait_v2", &call_.wait_for_event) &&
                      Find(library_, "nvmlEventSetFree", &call_.free_events);
  if (!events) call_.create_events = nullptr;
  return absl::OkStatus();
}

absl::Status Nvml::Check(nvml::Return result, const char* what) const {
  if (result == nvml::kSuccess) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(what, ": ", call_.error_string(result)));
}

absl::Status Nvml::ListGpus() {
  unsigned count = 0;
  RETURN_IF_ERROR(Check(call_.get_count(&count), "nvmlDeviceGetCount_v2"));
  for (unsigned index = 0; index < count; ++index) {
    nvml::Device device = nullptr;
    char uuid[nvml::kTextBytes] = {};
    char name[nvml::kTextBytes] = {};
    nvml::Memory memory = {};
    const char* what = "";
    nvml::Return result = nvml::kSuccess;
    const auto ask = [&](const char* function, auto answer) {
      if (result != nvml::kSuccess) return;
      what = function;
      result = answer();
    };
    ask("nvmlDeviceGetHandleByIndex_v2", [&] { return call_.get_handle(index, &device); });
    ask("nvmlDeviceGetUUID", [&] { return call_.get_uuid(device, uuid, sizeof(uuid)); });
    ask("nvmlDeviceGetName", [&] { return call_.get_name(device, name, sizeof(name)); });
    ask("nvmlDeviceGetMemoryInfo", [&] { return call_.get_memory(device, &memory); });
    if (result == nvml::kGpuIsLost) {
      spdlog::error("GPU {} is left out: it has fallen off the bus", index);
      continue;
    }
    RETURN_IF_ERROR(Check(result, what));
    v1::Gpu& gpu = gpus_.emplace_back();
    gpu.set_uuid(uuid);
    gpu.set_model(name);
    gpu.set_memory_bytes(memory.total_bytes);
    devices_.push_back(device);
  }
  return absl::OkStatus();
}

void Nvml::ListenForXids() {
  if (call_.create_events == nullptr || call_.create_events(&events_) != nvml::kSuccess) return;
  const auto registered = std::count_if(devices_.begin(), devices_.end(), [&](auto device) {
    return call_.register_events(device, nvml::kXidEvents, events_) == nvml::kSuccess;
  });
  if (registered > 0) return;
  call_.free_events(events_);
  events_ = nullptr;
}

GpuSample Nvml::Sample(size_t gpu) const {
  GpuSample sample;
  const nvml::Device device = devices_[gpu];
  // Whether the driver has the function and it gave a figure.
  const auto gave = [&](auto function, auto... arguments) {
    if (function == nullptr) return false;
    const nvml::Return result = function(device, arguments...);
    if (result == nvml::kGpuIsLost) sample.lost = true;
    return result == nvml::kSuccess;
  };
  nvml::Utilization utilization = {};
  if (gave(call_.get_utilization, &utilization)) sample.utilization = utilization.gpu / 100.0;
  if (nvml::Memory memory = {}; gave(call_.get_memory, &memory)) {
    sample.memory_used_bytes = memory.used_bytes;
    sample.memory_total_bytes = memory.total_bytes;
  }
  unsigned value = 0;
  if (gave(call_.get_power, &value)) sample.power_watts = value / 1e3;
  if (gave(call_.get_temperature, nvml::kGpuDie, &value)) sample.temperature_celsius = value;
  if (gave(call_.get_clock, nvml::kSmClock, &value)) sample.sm_hertz = value * 1e6;
  if (gave(call_.get_clock, nvml::kMemoryClock, &value)) sample.memory_hertz = value * 1e6;
  unsigned long long large = 0;
  if (gave(call_.get_throttle, &large)) sample.throttle = large;
  if (gave(call_.get_ecc_errors, nvml::kCorrected, nvml::kSinceDriverLoad, &large)) {
    sample.corrected_errors = large;
  }
  if (gave(call_.get_ecc_errors, nvml::kUncorrected, nvml::kSinceDriverLoad, &large)) {
    sample.uncorrected_errors = large;
  }
  unsigned corrected = 0, uncorrected = 0, pending = 0, failed = 0;
  if (gave(call_.get_remapped_rows, &corrected, &uncorrected, &pending, &failed)) {
    sample.row_remap_failed = failed != 0;
  }
  return sample;
}

absl::StatusOr<std::optional<XidEvent>> Nvml::AwaitXid(absl::Duration patience) const {
  if (events_ == nullptr) return absl::UnavailableError("the driver tells of no XID errors");
  nvml::EventData event = {};
  const nvml::Return result = call_.wait_for_event(
      events_, &event, static_cast<unsigned>(absl::ToInt64Milliseconds(patience)));
  if (result == nvml::kTimeout) return std::nullopt;
  RETURN_IF_ERROR(Check(result, "nvmlEventSetWait_v2"));
  const auto device = std::find(devices_.begin(), devices_.end(), event.device);
  if (device == devices_.end() || (event.type & nvml::kXidEvents) == 0) return std::nullopt;
  return XidEvent{.gpu = static_cast<size_t>(device - devices_.begin()), .xid = event.data};
}

}  // namespace ringleader::agent
