#include "coordinator/api/store_metrics.h"

#include <filesystem>
#include <utility>

namespace ringleader::api {
namespace {

const prometheus::Histogram::BucketBoundaries kCommitSeconds = {0.0005, 0.001, 0.0025, 0.005, 0.01,
                                                                0.025,  0.05,  0.1,    0.25,  1};

prometheus::ClientMetric Gauge(std::string label, std::string value, double number) {
  prometheus::ClientMetric metric;
  metric.label.push_back({std::move(label), std::move(value)});
  metric.gauge.value = number;
  return metric;
}

double FileBytes(const std::string& path) {
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  return error ? 0 : static_cast<double>(bytes);
}

}  // namespace

CommitMetrics::CommitMetrics(prometheus::Registry* registry)
    : duration_(prometheus::BuildHistogram()
                    .Name("ringleader_coordinator_store_commit_duration_seconds")
                    .Help("From the begin of a transaction until it is on disk.")
                    .Register(*registry)
                    .Add({}, kCommitSeconds)),
      writes_(prometheus::BuildCounter()
                  .Name("ringleader_coordinator_store_writes_total")
                  .Help("Writes that were committed; several can share a commit.")
                  .Register(*registry)
                  .Add({})) {}

void CommitMetrics::OnCommit(absl::Duration duration, int writes) {
  duration_.Observe(absl::ToDoubleSeconds(duration));
  writes_.Increment(writes);
}

StoreCollector::StoreCollector(store::Store* store, std::string database_path)
    : store_(store), database_path_(std::move(database_path)) {}

std::vector<prometheus::MetricFamily> StoreCollector::Collect() const {
  prometheus::MetricFamily jobs{.name = "ringleader_coordinator_jobs",
                                .help = "Jobs that are stored, by state.",
                                .type = prometheus::MetricType::Gauge,
                                .metric = {}};
  std::vector<double> counts(v1::Job::State_ARRAYSIZE, 0);
  const absl::Status read = store_->Read([&](store::ReadTransaction& t) -> absl::Status {
    const auto found = t.CountJobs();
    if (!found.ok()) return found.status();
    for (const auto& [state, count] : *found) {
      if (v1::Job::State_IsValid(state))
        counts[static_cast<size_t>(state)] = static_cast<double>(count);
    }
    return absl::OkStatus();
  });
  // A store that cannot be read has no count; 0 would be a lie.
  if (read.ok()) {
    for (int state = v1::Job::PENDING; state < v1::Job::State_ARRAYSIZE; ++state) {
      jobs.metric.push_back(Gauge("state", v1::Job::State_Name(static_cast<v1::Job::State>(state)),
                                  counts[static_cast<size_t>(state)]));
    }
  }
  prometheus::MetricFamily bytes{
      .name = "ringleader_coordinator_store_bytes",
      .help = "Size of the database and of its write-ahead log.",
      .type = prometheus::MetricType::Gauge,
      .metric = {Gauge("file", "database", FileBytes(database_path_)),
                 Gauge("file", "wal", FileBytes(database_path_ + "-wal"))}};
  std::vector<prometheus::MetricFamily> families;
  if (!jobs.metric.empty()) families.push_back(std::move(jobs));
  families.push_back(std::move(bytes));
  return families;
}

}  // namespace ringleader::api
