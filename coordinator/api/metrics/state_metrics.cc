#include "coordinator/api/metrics/state_metrics.h"

#include <filesystem>
#include <iterator>
#include <utility>

#include "base/status_macros.h"
#include "coordinator/api/metrics/gauge_family.h"
#include "coordinator/api/metrics/job_metrics.h"

namespace ringleader::api {
namespace {

const prometheus::Histogram::BucketBoundaries kCommitSeconds = {0.0005, 0.001, 0.0025, 0.005, 0.01,
                                                                0.025,  0.05,  0.1,    0.25,  1};

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

StateCollector::StateCollector(store::Store* store, const lifecycle::JobController* controller,
                               std::string database_path)
    : store_(*store), controller_(*controller), database_path_(std::move(database_path)) {}

std::vector<prometheus::MetricFamily> StateCollector::Collect() const {
  std::vector<prometheus::MetricFamily> families;
  CollectJobs(&families);
  CollectNodes(&families);
  prometheus::MetricFamily& bytes = families.emplace_back(GaugeFamily(
      "ringleader_coordinator_store_bytes", "Size of the database and of its write-ahead log."));
  AddGauge(&bytes, {{"file", "database"}}, FileBytes(database_path_));
  AddGauge(&bytes, {{"file", "wal"}}, FileBytes(database_path_ + "-wal"));
  prometheus::MetricFamily& full = families.emplace_back(
      GaugeFamily("ringleader_coordinator_disk_full",
                  "1 while the disk is full: training goes on, nothing else is written down."));
  AddGauge(&full, {}, store_.Space().ok() ? 0 : 1);
  return families;
}

void StateCollector::CollectJobs(std::vector<prometheus::MetricFamily>* families) const {
  std::vector<std::pair<v1::Job::State, int64_t>> counts;
  std::vector<prometheus::MetricFamily> running;
  const absl::Status read = store_.Read([&](store::ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(counts, t.CountJobs());
    return CollectRunningJobs(t, &running);
  });
  // A store that cannot be read has no count; 0 would be a lie.
  if (!read.ok()) return;

  std::vector<double> by_state(v1::Job::State_ARRAYSIZE, 0);
  for (const auto& [state, count] : counts) {
    if (v1::Job::State_IsValid(state))
      by_state[static_cast<size_t>(state)] = static_cast<double>(count);
  }
  prometheus::MetricFamily jobs =
      GaugeFamily("ringleader_coordinator_jobs", "Jobs that are stored, by state.");
  for (int state = v1::Job::PENDING; state < v1::Job::State_ARRAYSIZE; ++state) {
    AddGauge(&jobs, {{"state", v1::Job::State_Name(static_cast<v1::Job::State>(state))}},
             by_state[static_cast<size_t>(state)]);
  }
  families->push_back(std::move(jobs));

  std::move(running.begin(), running.end(), std::back_inserter(*families));
}

void StateCollector::CollectNodes(std::vector<prometheus::MetricFamily>* families) const {
  std::vector<double> by_state(v1::Node::State_ARRAYSIZE, 0);
  double used = 0, slots = 0;
  for (const v1::Node& node : controller_.ListNodes()) {
    if (v1::Node::State_IsValid(node.state())) ++by_state[static_cast<size_t>(node.state())];
    used += node.trainers_in_use();
    if (node.state() == v1::Node::READY) slots += node.inventory().trainers();
  }
  prometheus::MetricFamily nodes =
      GaugeFamily("ringleader_coordinator_nodes", "Nodes that are known, by state.");
  for (int state = v1::Node::READY; state < v1::Node::State_ARRAYSIZE; ++state) {
    AddGauge(&nodes, {{"state", v1::Node::State_Name(static_cast<v1::Node::State>(state))}},
             by_state[static_cast<size_t>(state)]);
  }
  families->push_back(std::move(nodes));
  prometheus::MetricFamily trainers =
      GaugeFamily("ringleader_coordinator_trainer_slots",
                  "Trainer slots of ready nodes, and trainers that are placed.");
  AddGauge(&trainers, {{"kind", "ready"}}, slots);
  AddGauge(&trainers, {{"kind", "in_use"}}, used);
  families->push_back(std::move(trainers));
}

}  // namespace ringleader::api
