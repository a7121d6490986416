#include "worker/agent/trainers/worker_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <string>

#include "absl/strings/ascii.h"

namespace ringleader::agent {
namespace {

prometheus::Gauge& AddGauge(prometheus::Registry& registry, const std::string& name,
                            const std::string& help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
}

prometheus::Counter& AddCounter(prometheus::Registry& registry, const std::string& name,
                                const std::string& help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
}

void RaiseTo(prometheus::Counter& counter, uint64_t total) {
  const double more = static_cast<double>(total) - counter.Value();
  if (more > 0) counter.Increment(more);
}

}  // namespace

WorkerMetrics::WorkerMetrics(prometheus::Registry& registry)
    : slots_(AddGauge(registry, "ringleader_worker_trainer_slots",
                      "Trainers that this worker can run")),
      trainers_(AddGauge(registry, "ringleader_worker_trainers", "Trainers that run now")),
      connected_(AddGauge(registry, "ringleader_worker_connected",
                          "1 while in session with the coordinator")),
      out_of_contact_(AddGauge(registry, "ringleader_worker_out_of_contact_seconds",
                               "Age of the newest heartbeat that is known to have arrived")),
      buffered_(AddGauge(registry, "ringleader_worker_buffered_messages",
                         "Messages that the coordinator has not acknowledged")),
      sessions_(AddCounter(registry, "ringleader_worker_sessions_total",
                           "Sessions that the coordinator welcomed")),
      dropped_log_lines_(AddCounter(registry, "ringleader_worker_dropped_log_lines_total",
                                    "Log lines dropped because the buffer was full")),
      dropped_step_reports_(AddCounter(registry, "ringleader_worker_dropped_step_reports_total",
                                       "Reports of steps dropped because the buffer was full")),
      exits_(prometheus::BuildCounter()
                 .Name("ringleader_worker_trainer_exits_total")
                 .Help("Trainers that ended, by outcome")
                 .Register(registry)) {
  for (const char* outcome : {"completed", "stopped", "failed"}) exits_.Add({{"outcome", outcome}});
}

void WorkerMetrics::SetSlots(size_t slots) {
  slots_.Set(static_cast<double>(slots));
}
void WorkerMetrics::SetTrainers(size_t running) {
  trainers_.Set(static_cast<double>(running));
}
void WorkerMetrics::SetConnected(bool connected) {
  connected_.Set(connected ? 1 : 0);
}
void WorkerMetrics::SetOutOfContact(double seconds) {
  out_of_contact_.Set(seconds);
}
void WorkerMetrics::SetBuffered(size_t messages) {
  buffered_.Set(static_cast<double>(messages));
}
void WorkerMetrics::SetSessions(uint64_t total) {
  RaiseTo(sessions_, total);
}
void WorkerMetrics::SetDroppedLogLines(uint64_t total) {
  RaiseTo(dropped_log_lines_, total);
}
void WorkerMetrics::SetDroppedStepReports(uint64_t total) {
  RaiseTo(dropped_step_reports_, total);
}

void WorkerMetrics::TrainerExited(v1::TrainerExited::Outcome outcome) {
  exits_.Add({{"outcome", absl::AsciiStrToLower(v1::TrainerExited::Outcome_Name(outcome))}})
      .Increment();
}

}  // namespace ringleader::agent
