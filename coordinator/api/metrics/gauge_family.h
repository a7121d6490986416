// Gauges for a prometheus::Collectable, which makes its families anew each time it is asked.
#pragma once

#include <prometheus/client_metric.h>
#include <prometheus/metric_family.h>

#include <string>
#include <utility>
#include <vector>

namespace ringleader::api {

inline prometheus::MetricFamily GaugeFamily(std::string name, std::string help) {
  return {.name = std::move(name),
          .help = std::move(help),
          .type = prometheus::MetricType::Gauge,
          .metric = {}};
}

inline void AddGauge(prometheus::MetricFamily* family,
                     std::vector<prometheus::ClientMetric::Label> labels, double number) {
  prometheus::ClientMetric& metric = family->metric.emplace_back();
  metric.label = std::move(labels);
  metric.gauge.value = number;
}

}  // namespace ringleader::api
