#include "worker/agent/gpu/gpu_metrics.h"

#include <prometheus/metric_family.h>

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace ringleader::agent {
namespace {

using Labels = std::vector<prometheus::ClientMetric::Label>;

constexpr std::pair<nvml::Throttle, const char*> kThrottles[] = {
    {nvml::kPowerCap, "power_cap"},
    {nvml::kHardwareSlowdown, "hardware_slowdown"},
    {nvml::kSoftwareThermal, "software_thermal"},
    {nvml::kHardwareThermal, "hardware_thermal"},
    {nvml::kPowerBrake, "power_brake"},
};

class Family {
 public:
  Family(const std::string& what, std::string help,
         prometheus::MetricType type = prometheus::MetricType::Gauge)
      : family_{.name = absl::StrCat("ringleader_worker_gpu_", what),
                .help = std::move(help),
                .type = type,
                .metric = {}} {}

  template <typename Value>
  void Add(const Labels& labels, const std::optional<Value>& value) {
    if (!value) return;
    prometheus::ClientMetric& metric = family_.metric.emplace_back();
    metric.label = labels;
    const auto number = static_cast<double>(*value);
    if (family_.type == prometheus::MetricType::Counter) {
      metric.counter.value = number;
    } else {
      metric.gauge.value = number;
    }
  }
  prometheus::MetricFamily Take() { return std::move(family_); }

 private:
  prometheus::MetricFamily family_;
};

Labels With(Labels labels, const char* name, std::string value) {
  labels.push_back({.name = name, .value = std::move(value)});
  return labels;
}

struct Families {
  Family healthy{"healthy", "1: it takes trainers; 0: it has reported uncorrectable errors"};
  Family utilization{"utilization_ratio", "Share of the time in which a kernel ran"};
  Family memory_used{"memory_used_bytes", "Memory in use"};
  Family memory_total{"memory_total_bytes", "Memory that there is"};
  Family power{"power_watts", "Power drawn"};
  Family temperature{"temperature_celsius", "Temperature of the die"};
  Family clock{"clock_hertz", "Clock, of the multiprocessors and of memory"};
  Family throttled{"throttled", "1 while this holds the clocks down"};
  Family ecc{"ecc_errors_total", "Memory errors since the driver was loaded",
             prometheus::MetricType::Counter};
  Family xids{"xid_errors_total", "XID errors since the worker started",
              prometheus::MetricType::Counter};
  Family age{"sample_age_seconds", "How long ago the driver last answered for all GPUs"};

  void Add(const Labels& gpu, const WatchedGpu& watched) {
    const GpuSample& sample = watched.sample;
    healthy.Add(gpu, std::optional(FaultOf(watched).empty()));
    utilization.Add(gpu, sample.utilization);
    memory_used.Add(gpu, sample.memory_used_bytes);
    memory_total.Add(gpu, sample.memory_total_bytes);
    power.Add(gpu, sample.power_watts);
    temperature.Add(gpu, sample.temperature_celsius);
    clock.Add(With(gpu, "clock", "sm"), sample.sm_hertz);
    clock.Add(With(gpu, "clock", "memory"), sample.memory_hertz);
    for (const auto& [bit, reason] : kThrottles) {
      if (!sample.throttle) break;
      throttled.Add(With(gpu, "reason", reason), std::optional((*sample.throttle & bit) != 0));
    }
    ecc.Add(With(gpu, "kind", "corrected"), sample.corrected_errors);
    ecc.Add(With(gpu, "kind", "uncorrected"), sample.uncorrected_errors);
    for (const auto& [xid, times] : watched.xids) {
      xids.Add(With(gpu, "xid", absl::StrCat(xid)), std::optional(times));
    }
  }
};

}  // namespace

std::vector<prometheus::MetricFamily> GpuMetrics::Collect() const {
  const std::vector<WatchedGpu> gpus = monitor_->Watched();
  if (gpus.empty()) return {};
  Families families;
  for (size_t index = 0; index < gpus.size(); ++index) {
    families.Add({{.name = "gpu", .value = absl::StrCat(index)},
                  {.name = "uuid", .value = gpus[index].gpu.uuid()}},
                 gpus[index]);
  }
  families.age.Add({}, std::optional(absl::ToDoubleSeconds(monitor_->SampleAge())));
  std::vector<prometheus::MetricFamily> all;
  for (Family* family :
       {&families.healthy, &families.utilization, &families.memory_used, &families.memory_total,
        &families.power, &families.temperature, &families.clock, &families.throttled, &families.ecc,
        &families.xids, &families.age}) {
    all.push_back(family->Take());
  }
  return all;
}

}  // namespace ringleader::agent
