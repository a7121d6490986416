// The worker's figures at /metrics.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ringleader/v1/worker_control.pb.h"

namespace prometheus {
class Counter;
class Gauge;
template <typename T>
class Family;
class Registry;
}  // namespace prometheus

namespace ringleader::agent {

// Thread-safe.
class WorkerMetrics {
 public:
  explicit WorkerMetrics(prometheus::Registry& registry);

  void SetSlots(size_t slots);
  void SetTrainers(size_t running);
  void SetConnected(bool connected);
  void SetOutOfContact(double seconds);
  void SetBuffered(size_t messages);
  // Totals since the start; they never fall.
  void SetSessions(uint64_t total);
  void SetDroppedLogLines(uint64_t total);
  void SetDroppedStepReports(uint64_t total);
  void TrainerExited(v1::TrainerExited::Outcome outcome);

 private:
  prometheus::Gauge& slots_;
  prometheus::Gauge& trainers_;
  prometheus::Gauge& connected_;
  prometheus::Gauge& out_of_contact_;
  prometheus::Gauge& buffered_;
  prometheus::Counter& sessions_;
  prometheus::Counter& dropped_log_lines_;
  prometheus::Counter& dropped_step_reports_;
  prometheus::Family<prometheus::Counter>& exits_;
};

}  // namespace ringleader::agent
