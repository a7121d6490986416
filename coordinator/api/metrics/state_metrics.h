// What /metrics says of commits, jobs and nodes. docs/metrics.md lists all of it.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "coordinator/lifecycle/job_controller.h"
#include "coordinator/store/store.h"

namespace ringleader::api {

// Counts commits; hand OnCommit to the store.
class CommitMetrics {
 public:
  explicit CommitMetrics(prometheus::Registry* registry);
  void OnCommit(absl::Duration duration, int writes);

 private:
  prometheus::Histogram& duration_;
  prometheus::Counter& writes_;
};

// The state of the cluster, asked for when Prometheus asks: nothing to keep in step, and no series
// outlives its job.
class StateCollector : public prometheus::Collectable {
 public:
  // Both must outlive it.
  StateCollector(store::Store* store, const lifecycle::JobController* controller,
                 std::string database_path);

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  void CollectJobs(std::vector<prometheus::MetricFamily>* families) const;
  void CollectNodes(std::vector<prometheus::MetricFamily>* families) const;

  store::Store& store_;
  const lifecycle::JobController& controller_;
  const std::string database_path_;
};

}  // namespace ringleader::api
