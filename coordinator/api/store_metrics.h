// What /metrics says of the store: jobs by state, commits, and the size of its files.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <string>
#include <vector>

#include "absl/time/time.h"
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

// Asks the store when Prometheus asks: nothing to keep in step, and a series per state, not per
// job.
class StoreCollector : public prometheus::Collectable {
 public:
  // `store` must outlive it.
  StoreCollector(store::Store* store, std::string database_path);

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  store::Store* const store_;
  const std::string database_path_;
};

}  // namespace ringleader::api
