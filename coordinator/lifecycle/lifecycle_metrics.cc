#include "coordinator/lifecycle/lifecycle_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <string>

namespace ringleader::lifecycle {
namespace {

prometheus::Counter* AddCounter(prometheus::Registry& registry, const std::string& name,
                                const std::string& help) {
  return &prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
}

}  // namespace

LifecycleMetrics::LifecycleMetrics(prometheus::Registry* registry) {
  if (registry == nullptr) return;
  // The buckets reach from a commit on a fast disk to one that stalls.
  const prometheus::Histogram::BucketBoundaries seconds = {0.001, 0.002, 0.005, 0.01, 0.025, 0.05,
                                                           0.1,   0.25,  0.5,   1,    2.5};
  batch_duration_ = &prometheus::BuildHistogram()
                         .Name("ringleader_coordinator_batch_duration_seconds")
                         .Help("One batch of requests and events, until it is on disk")
                         .Register(*registry)
                         .Add({}, seconds);
  items_ = AddCounter(*registry, "ringleader_coordinator_batch_items_total",
                      "Requests and events that were taken up");
  failed_batches_ = AddCounter(*registry, "ringleader_coordinator_failed_batches_total",
                               "Batches that the store refused; workers send their events again");
  sessions_ = AddCounter(*registry, "ringleader_coordinator_worker_sessions_total",
                         "Sessions of workers that began");
  leases_ = AddCounter(*registry, "ringleader_coordinator_leases_expired_total",
                       "Times that a worker fell silent for longer than its lease");
  steps_ = AddCounter(*registry, "ringleader_coordinator_steps_recorded_total",
                      "Training steps that were merged over their ranks and recorded");
  transitions_ = &prometheus::BuildCounter()
                      .Name("ringleader_coordinator_job_transitions_total")
                      .Help("Jobs that entered a state")
                      .Register(*registry);
  attempts_ = &prometheus::BuildCounter()
                   .Name("ringleader_coordinator_attempts_ended_total")
                   .Help("Attempts that ended, by outcome")
                   .Register(*registry);
  // A rate over a series that begins at 1 misses the first event, so that all begin at 0.
  for (int state = v1::Job::PENDING; state < v1::Job::State_ARRAYSIZE; ++state) {
    transitions_->Add({{"to", v1::Job::State_Name(static_cast<v1::Job::State>(state))}});
  }
  for (const v1::Attempt::State outcome :
       {v1::Attempt::SUCCEEDED, v1::Attempt::FAILED, v1::Attempt::CANCELLED, v1::Attempt::PAUSED,
        v1::Attempt::FENCED}) {
    attempts_->Add({{"outcome", v1::Attempt::State_Name(outcome)}});
  }
}

void LifecycleMetrics::Batch(size_t items, absl::Duration duration, bool committed) {
  if (batch_duration_ == nullptr) return;
  batch_duration_->Observe(absl::ToDoubleSeconds(duration));
  items_->Increment(static_cast<double>(items));
  if (!committed) failed_batches_->Increment();
}

void LifecycleMetrics::JobBecame(v1::Job::State state) {
  if (transitions_ != nullptr) transitions_->Add({{"to", v1::Job::State_Name(state)}}).Increment();
}

void LifecycleMetrics::AttemptEnded(v1::Attempt::State state) {
  if (attempts_ == nullptr) return;
  attempts_->Add({{"outcome", v1::Attempt::State_Name(state)}}).Increment();
}

void LifecycleMetrics::SessionBegan() {
  if (sessions_ != nullptr) sessions_->Increment();
}

void LifecycleMetrics::LeaseRanOut() {
  if (leases_ != nullptr) leases_->Increment();
}

void LifecycleMetrics::StepsRecorded(size_t steps) {
  if (steps_ != nullptr) steps_->Increment(static_cast<double>(steps));
}

}  // namespace ringleader::lifecycle
