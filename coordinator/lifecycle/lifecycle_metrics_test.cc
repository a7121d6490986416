#include "coordinator/lifecycle/lifecycle_metrics.h"

#include <gtest/gtest.h>
#include <prometheus/registry.h>

#include <map>
#include <string>

#include "absl/strings/str_cat.h"

namespace ringleader::lifecycle {
namespace {

// By name and label; of histograms the number of observations, and their sum.
std::map<std::string, double> Collected(prometheus::Registry& registry) {
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : registry.Collect()) {
    for (const prometheus::ClientMetric& metric : family.metric) {
      std::string name = family.name;
      for (const auto& label : metric.label) {
        absl::StrAppend(&name, " ", label.name, "=", label.value);
      }
      values[name] = metric.counter.value;
      if (family.type != prometheus::MetricType::Histogram) continue;
      values[name] = static_cast<double>(metric.histogram.sample_count);
      values[name + " sum"] = metric.histogram.sample_sum;
    }
  }
  return values;
}

// All of them at 0.
std::map<std::string, double> AllSeries() {
  const std::string prefix = "ringleader_coordinator_";
  std::map<std::string, double> values;
  for (const char* const name :
       {"batch_duration_seconds", "batch_duration_seconds sum", "batch_items_total",
        "failed_batches_total", "worker_sessions_total", "leases_expired_total",
        "steps_recorded_total"}) {
    values[prefix + name] = 0;
  }
  for (const char* const state :
       {"PENDING", "STARTING", "RUNNING", "UNKNOWN", "RETRYING", "PAUSING", "PAUSED", "CANCELLING",
        "CANCELLED", "SUCCEEDED", "FAILED"}) {
    values[absl::StrCat(prefix, "job_transitions_total to=", state)] = 0;
  }
  for (const char* const outcome : {"SUCCEEDED", "FAILED", "CANCELLED", "PAUSED", "FENCED"}) {
    values[absl::StrCat(prefix, "attempts_ended_total outcome=", outcome)] = 0;
  }
  return values;
}

TEST(LifecycleMetricsTest, EverySeriesBeginsAtZeroAndCountsItsOwn) {
  prometheus::Registry registry;
  LifecycleMetrics metrics(&registry);
  std::map<std::string, double> expected = AllSeries();
  EXPECT_EQ(Collected(registry), expected);
  for (const size_t items : {1, 2})
    metrics.Batch(items, absl::Milliseconds(250), /*committed=*/true);
  metrics.Batch(4, absl::Milliseconds(1500), /*committed=*/false);
  metrics.JobBecame(v1::Job::RETRYING);
  metrics.AttemptEnded(v1::Attempt::FENCED);
  metrics.SessionBegan();
  metrics.LeaseRanOut();
  metrics.StepsRecorded(5);
  expected["ringleader_coordinator_batch_duration_seconds"] = 3;
  expected["ringleader_coordinator_batch_duration_seconds sum"] = 2;
  expected["ringleader_coordinator_batch_items_total"] = 7;
  expected["ringleader_coordinator_failed_batches_total"] = 1;
  expected["ringleader_coordinator_job_transitions_total to=RETRYING"] = 1;
  expected["ringleader_coordinator_attempts_ended_total outcome=FENCED"] = 1;
  expected["ringleader_coordinator_worker_sessions_total"] = 1;
  expected["ringleader_coordinator_leases_expired_total"] = 1;
  expected["ringleader_coordinator_steps_recorded_total"] = 5;
  EXPECT_EQ(Collected(registry), expected);
}

TEST(LifecycleMetricsTest, WithoutARegistryNothingIsCounted) {
  LifecycleMetrics metrics(nullptr);
  metrics.Batch(1, absl::Seconds(1), false);
  metrics.JobBecame(v1::Job::RUNNING);
  metrics.AttemptEnded(v1::Attempt::FAILED);
  metrics.SessionBegan();
  metrics.LeaseRanOut();
  metrics.StepsRecorded(1);
}

}  // namespace
}  // namespace ringleader::lifecycle
