// The part of NVML's binary interface that this daemon calls: types and values are those of
// NVIDIA's nvml.h, which Debian does not carry. All of it has been the same since driver 450.
#pragma once

namespace ringleader::agent::nvml {

extern "C" {
struct DeviceHandle;
struct EventSetHandle;
}
using Device = DeviceHandle*;
using EventSet = EventSetHandle*;

enum Return : int {
  kSuccess = 0,
  kNotSupported = 3,
  kTimeout = 10,
  kGpuIsLost = 15,
};

// Bytes that names and UUIDs fit into.
constexpr unsigned kTextBytes = 96;

struct Memory {
  unsigned long long total_bytes;
  unsigned long long free_bytes;
  unsigned long long used_bytes;
};

struct Utilization {  // per cent
  unsigned gpu;
  unsigned memory;
};

enum Clock : int { kSmClock = 1, kMemoryClock = 2 };
enum TemperatureSensor : int { kGpuDie = 0 };
enum EccErrors : int { kCorrected = 0, kUncorrected = 1 };
enum EccCounter : int { kSinceDriverLoad = 0 };

// Bits of what holds the clocks down; further ones (idle, set by somebody) are no throttling.
enum Throttle : unsigned long long {
  kPowerCap = 0x4,
  kHardwareSlowdown = 0x8,
  kSoftwareThermal = 0x20,
  kHardwareThermal = 0x40,
  kPowerBrake = 0x80,
};

constexpr unsigned long long kXidEvents = 0x8;

struct EventData {
  Device device;
  unsigned long long type;
  unsigned long long data;  // the XID
  unsigned gpu_instance;
  unsigned compute_instance;
};

// The library's functions; those that a driver may lack are null there.
struct Functions {
  Return (*init)();
  Return (*shutdown)();
  const char* (*error_string)(Return);
  Return (*get_count)(unsigned*);
  Return (*get_handle)(unsigned index, Device*);
  Return (*get_uuid)(Device, char*, unsigned bytes);
  Return (*get_name)(Device, char*, unsigned bytes);
  Return (*get_memory)(Device, Memory*);
  // Drivers may lack what follows.
  Return (*get_utilization)(Device, Utilization*);
  Return (*get_power)(Device, unsigned* milliwatts);
  Return (*get_temperature)(Device, TemperatureSensor, unsigned* celsius);
  Return (*get_clock)(Device, Clock, unsigned* megahertz);
  Return (*get_throttle)(Device, unsigned long long* bits);
  Return (*get_ecc_errors)(Device, EccErrors, EccCounter, unsigned long long*);
  Return (*get_remapped_rows)(Device, unsigned* corrected, unsigned* uncorrected, unsigned* pending,
                              unsigned* failed);
  Return (*create_events)(EventSet*);
  Return (*register_events)(Device, unsigned long long types, EventSet);
  Return (*wait_for_event)(EventSet, EventData*, unsigned milliseconds);
  Return (*free_events)(EventSet);
};

}  // namespace ringleader::agent::nvml
