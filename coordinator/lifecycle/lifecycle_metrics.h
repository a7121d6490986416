// The control plane's figures at /metrics: what it decided, and how busy it is. Gauges of jobs and
// nodes are read off the store elsewhere.
#pragma once

#include <cstddef>

#include "absl/time/time.h"
#include "ringleader/v1/job.pb.h"

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
class Registry;
template <typename T>
class Family;
}  // namespace prometheus

namespace ringleader::lifecycle {

// Thread-safe. Without a registry all calls do nothing.
class LifecycleMetrics {
 public:
  explicit LifecycleMetrics(prometheus::Registry* registry);

  // One batch that was committed or refused by the store: requests and events in it, and how long
  // they took from being taken up.
  void Batch(size_t items, absl::Duration duration, bool committed);
  void JobBecame(v1::Job::State state);
  void AttemptEnded(v1::Attempt::State state);
  void SessionBegan();
  void LeaseRanOut();
  void StepsRecorded(size_t steps);

 private:
  prometheus::Histogram* batch_duration_ = nullptr;
  prometheus::Counter* items_ = nullptr;
  prometheus::Counter* failed_batches_ = nullptr;
  prometheus::Counter* sessions_ = nullptr;
  prometheus::Counter* leases_ = nullptr;
  prometheus::Counter* steps_ = nullptr;
  prometheus::Family<prometheus::Counter>* transitions_ = nullptr;
  prometheus::Family<prometheus::Counter>* attempts_ = nullptr;
};

}  // namespace ringleader::lifecycle
