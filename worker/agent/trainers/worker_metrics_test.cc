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

std::map<std::string, double> Gauges(prometheus::Registry& registry) {
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : registry.Collect()) {
    if (family.type != prometheus::MetricType::Gauge) continue;
    values[family.name] = family.metric.at(0).gauge.value;
  }
  return values;
}

TEST(WorkerMetricsTest, GaugesAreWhatWasSetLast) {
  prometheus::Registry registry;
  WorkerMetrics metrics(registry);
  std::map<std::string, double> expected = {{"ringleader_worker_trainer_slots", 0},
                                            {"ringleader_worker_trainers", 0},
                                            {"ringleader_worker_connected", 0},
                                            {"ringleader_worker_out_of_contact_seconds", 0},
                                            {"ringleader_worker_buffered_messages", 0}};
  EXPECT_EQ(Gauges(registry), expected);
  for (const int value : {9, 1}) {
    metrics.SetSlots(4 + value);
    metrics.SetTrainers(2 + value);
    metrics.SetConnected(value == 1);
    metrics.SetOutOfContact(0.5 * value);
    metrics.SetBuffered(6 + value);
  }
  expected = {{"ringleader_worker_trainer_slots", 5},
              {"ringleader_worker_trainers", 3},
              {"ringleader_worker_connected", 1},
              {"ringleader_worker_out_of_contact_seconds", 0.5},
              {"ringleader_worker_buffered_messages", 7}};
  EXPECT_EQ(Gauges(registry), expected);
  metrics.SetConnected(false);
  EXPECT_EQ(Gauges(registry)["ringleader_worker_connected"], 0);
}

// Each outcome is there from the start, so that a rate of it is known when the first one comes.
TEST(WorkerMetricsTest, TrainersThatEndedAreCountedByOutcome) {
  prometheus::Registry registry;
  WorkerMetrics metrics(registry);
  const auto exits = [&registry] {
    std::map<std::string, double> by_outcome;
    for (const prometheus::MetricFamily& family : registry.Collect()) {
      if (family.name != "ringleader_worker_trainer_exits_total") continue;
      for (const prometheus::ClientMetric& metric : family.metric) {
        by_outcome[metric.label.at(0).value] = metric.counter.value;
      }
    }
    return by_outcome;
  };
  std::map<std::string, double> expected = {{"completed", 0}, {"stopped", 0}, {"failed", 0}};
  EXPECT_EQ(exits(), expected);
  metrics.TrainerExited(v1::TrainerExited::COMPLETED);
  for (int i = 0; i < 2; ++i) metrics.TrainerExited(v1::TrainerExited::STOPPED);
  for (int i = 0; i < 3; ++i) metrics.TrainerExited(v1::TrainerExited::FAILED);
  expected = {{"completed", 1}, {"stopped", 2}, {"failed", 3}};
  EXPECT_EQ(exits(), expected);
}

}  // namespace
}  // namespace ringleader::agent
