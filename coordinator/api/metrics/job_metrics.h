// What /metrics says of jobs that run. docs/metrics.md lists all of it.
#pragma once

#include <prometheus/metric_family.h>

#include <vector>

#include "absl/status/status.h"
#include "coordinator/store/store.h"

namespace ringleader::api {

// More running jobs than this are counted, but have no series of their own.
inline constexpr int kMaxJobSeries = 1000;
// A job has five series a layer at most as long as all jobs' together are at most this many; the
// jobs that were submitted last come first.
inline constexpr int kMaxLayerSeries = 6000;

// Appends the series of the newest kMaxJobSeries jobs that are RUNNING: progress, the last step's
// phases and layers, and on which hosts they run. An error when the store cannot be read; nothing
// is appended then.
absl::Status CollectRunningJobs(store::ReadTransaction& transaction,
                                std::vector<prometheus::MetricFamily>* families);

}  // namespace ringleader::api
