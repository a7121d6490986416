// A library with NVML's functions for tests, opened in place of the driver's. The file that
// RINGLEADER_FAKE_NVML names says what it shows, read anew by every call, a line a fact:
//
//   gpus 2                          how many there are; their UUIDs are GPU-fake-0, GPU-fake-1, ...
//   uncorrected 1 5                 GPU 1 has had so many uncorrectable memory errors
//   uncorrected_ever 1 9            and so many in all, those before the driver was loaded, too
//   xid 1 79                        the driver reports this, once
//   xid_times 2                     or so often
//   event_type 16                   the bit of the kind of event as which it reports it
//   deaf 0 1                        it reports nothing of GPU 0
//   remap_failed 1 1                a memory row of GPU 1 could not be replaced
//   lost 1 1                        GPU 1 answers nothing
//   throttle 8                      the bits of what holds the clocks down
//   fail nvmlDeviceGetPowerUsage 3  the function returns this
//   hang nvmlDeviceGetPowerUsage 1  the function returns once this line has gone
//
// FakeNvmlInUse() says what its callers have not given back.
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "worker/agent/gpu/nvml_abi.h"

namespace {

using namespace ringleader::agent::nvml;  // NOLINT: this file is that library

// The number that stands after these words; `otherwise` where no line has them.
long Fact(const std::string& words, long otherwise = 0) {
  const char* const path = std::getenv("RINGLEADER_FAKE_NVML");
  std::ifstream file(path == nullptr ? "" : path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(words + " ", 0) == 0) return std::atol(line.c_str() + words.size());
  }
  return otherwise;
}

std::string Of(const std::string& word, Device device) {
  return word + " " + std::to_string(reinterpret_cast<uintptr_t>(device) - 1);
}

Return Answer(const char* function, Device device = nullptr) {
  while (Fact(std::string("hang ") + function) != 0) usleep(1000);
  if (device != nullptr && Fact(Of("lost", device)) != 0) return kGpuIsLost;
  return static_cast<Return>(Fact(std::string("fail ") + function, kSuccess));
}

// Sets `*out` where the call succeeds.
template <typename Out, typename Value>
Return Give(const char* function, Device device, Out* out, Value value) {
  const Return result = Answer(function, device);
  if (result == kSuccess) *out = static_cast<Out>(value);
  return result;
}

int xids_told = 0;
std::atomic<int> initialized = 0, event_sets = 0;

}  // namespace

extern "C" {

int FakeNvmlInUse() {
  return 10 * initialized + event_sets;
}

Return nvmlInit_v2() {
  xids_told = 0;
  ++initialized;
  return Answer(__func__);
}
Return nvmlShutdown() {
  --initialized;
  return Answer(__func__);
}
const char* nvmlErrorString(Return result) {
  return result == kNotSupported ? "Not Supported" : "Some Error";
}
#ifndef FAKE_NVML_WITHOUT_REQUIRED
Return nvmlDeviceGetCount_v2(unsigned* count) {
  return Give(__func__, nullptr, count, Fact("gpus"));
}
#endif
Return nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
  *device = reinterpret_cast<Device>(uintptr_t{index} + 1);
  return Answer(__func__);
}
Return nvmlDeviceGetUUID(Device device, char* text, unsigned bytes) {
  std::snprintf(text, bytes, "GPU-fake-%d",
                static_cast<int>(reinterpret_cast<uintptr_t>(device) - 1));
  return Answer(__func__);
}
Return nvmlDeviceGetName(Device, char* text, unsigned bytes) {
  std::snprintf(text, bytes, "NVIDIA Fake");
  return Answer(__func__);
}
Return nvmlDeviceGetMemoryInfo(Device device, Memory* memory) {
  return Give(__func__, device, memory, Memory{80ULL << 30, 60ULL << 30, 20ULL << 30});
}
Return nvmlDeviceGetUtilizationRates(Device device, Utilization* utilization) {
  return Give(__func__, device, utilization, Utilization{97, 40});
}
Return nvmlDeviceGetPowerUsage(Device device, unsigned* milliwatts) {
  return Give(__func__, device, milliwatts, 652'400);
}
Return nvmlDeviceGetTemperature(Device device, TemperatureSensor, unsigned* celsius) {
  return Give(__func__, device, celsius, 61);
}
Return nvmlDeviceGetClockInfo(Device device, Clock clock, unsigned* megahertz) {
  return Give(__func__, device, megahertz, clock == kSmClock ? 1755 : 3201);
}

// Older drivers have these and no nvmlEventSetWait_v2.
Return nvmlEventSetCreate(EventSet* events) {
  *events = reinterpret_cast<EventSet>(uintptr_t{1});
  ++event_sets;
  return Answer(__func__);
}
Return nvmlEventSetFree(EventSet) {
  --event_sets;
  return Answer(__func__);
}
Return nvmlDeviceRegisterEvents(Device device, unsigned long long, EventSet) {
  return Fact(Of("deaf", device)) != 0 ? kNotSupported : Answer(__func__);
}

#ifndef FAKE_NVML_WITHOUT_OPTIONAL
Return nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long* bits) {
  return Give(__func__, device, bits, Fact("throttle", kPowerCap));
}
Return nvmlDeviceGetTotalEccErrors(Device device, EccErrors errors, EccCounter counter,
                                   unsigned long long* count) {
  const char* const fact = counter == kSinceDriverLoad ? "uncorrected" : "uncorrected_ever";
  return Give(__func__, device, count, errors == kCorrected ? 3 : Fact(Of(fact, device)));
}
Return nvmlDeviceGetRemappedRows(Device device, unsigned* corrected, unsigned* uncorrected,
                                 unsigned* pending, unsigned* failed) {
  *corrected = *uncorrected = *pending = 0;
  return Give(__func__, device, failed, Fact(Of("remap_failed", device)));
}
Return nvmlEventSetWait_v2(EventSet, EventData* event, unsigned milliseconds) {
  const Return result = Answer(__func__);
  if (result != kSuccess) return result;
  for (unsigned waited = 0; waited <= milliseconds; ++waited) {
    const bool all_told = xids_told >= Fact("xid_times", 1);
    for (uintptr_t gpu = 0; !all_told && gpu < static_cast<uintptr_t>(Fact("gpus")); ++gpu) {
      const auto device = reinterpret_cast<Device>(gpu + 1);
      const long xid = Fact(Of("xid", device));
      if (xid == 0) continue;
      const auto type = static_cast<unsigned long long>(Fact("event_type", kXidEvents));
      *event = {device, type, static_cast<unsigned long long>(xid), ~0U, ~0U};
      ++xids_told;
      return kSuccess;
    }
    usleep(1000);
  }
  return kTimeout;
}
#endif

}  // extern "C"
