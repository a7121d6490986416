// What the GPUs do, at /metrics: ringleader_worker_gpu_* (docs/metrics.md).
#pragma once

#include <prometheus/collectable.h>

#include <vector>

#include "worker/agent/gpu/gpu_monitor.h"

namespace ringleader::agent {

class GpuMetrics : public prometheus::Collectable {
 public:
  // `monitor` must outlive this.
  explicit GpuMetrics(const GpuMonitor* monitor) : monitor_(monitor) {}

  // Reads the last samples; never asks the driver.
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const GpuMonitor* const monitor_;
};

}  // namespace ringleader::agent
