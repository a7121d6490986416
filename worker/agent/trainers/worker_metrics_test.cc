#include "worker/agent/trainers/worker_metrics.h"

#include <gtest/gtest.h>
#include <prometheus/registry.h>

#include <map>
#include <string>

namespace ringleader::agent {
namespace {

std::map<std::string, double> Counters(prometheus::Registry& registry) {
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : registry.Collect()) {
    if (family.type != prometheus::MetricType::Counter || family.metric.size() != 1) continue;
    values[family.name] = family.metric[0].counter.value;
  }
  return values;
}

TEST(WorkerMetricsTest, CountersRiseToTheirTotals) {
  prometheus::Registry registry;
  WorkerMetrics metrics(registry);
  for (const uint64_t total : {2, 5, 5}) {
    metrics.SetSessions(total);
    metrics.SetDroppedLogLines(10 * total);
    metrics.SetDroppedStepReports(100 * total);
  }
  const std::map<std::string, double> expected = {
      {"ringleader_worker_sessions_total", 5},
      {"ringleader_worker_dropped_log_lines_total", 50},
      {"ringleader_worker_dropped_step_reports_total", 500}};
  EXPECT_EQ(Counters(registry), expected);
}

}  // namespace
}  // namespace ringleader::agent
