// Follows the store, and sends the trace of every attempt to a collector, beside everything else:
// it reads what is committed, in a thread of its own, and nothing waits for it.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/clock.h"
#include "coordinator/store/store.h"
#include "coordinator/trace/delivery_log.h"
#include "coordinator/trace/exporter.h"
#include "coordinator/trace/trace_book.h"
#include "coordinator/trace/trace_options.h"

namespace ringleader::trace {

// Thread-safe.
class JobTracer {
 public:
  // Goes on where the tracer before it was, as the file `log` says; without one, what the store
  // says to be over before this call is not sent. So call it before anything is decided. All
  // pointers must outlive the tracer. INVALID_ARGUMENT names the flag that is wrong.
  static absl::StatusOr<std::unique_ptr<JobTracer>> Start(const TraceOptions& options,
                                                          const ExportLimits& limits,
                                                          const std::string& log,
                                                          store::Store* store, const Clock* clock,
                                                          prometheus::Registry* registry);
  ~JobTracer();

 private:
  JobTracer(TraceBook book, DeliveryLog log, std::unique_ptr<Exporter> exporter,
            store::Store* store, const Clock* clock)
      : store_(*store),
        clock_(*clock),
        book_(std::move(book)),
        log_(std::move(log)),
        complete_until_(clock->Now()),
        exporter_(std::move(exporter)) {}
  // Sends what was over and not sent when the tracer before this one ended.
  absl::Status Adopt();
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether all of them could be read.
  bool Pass(const std::set<std::string>& jobs);
  void Send(std::vector<otlp::Span> spans);
  void Settle();

  store::Store& store_;
  const Clock& clock_;
  // These are of the thread alone, while it runs.
  TraceBook book_;
  DeliveryLog log_;
  absl::Time complete_until_;  // what was recorded before has been handed to the exporter
  bool log_fails_ = false;
  const std::unique_ptr<Exporter> exporter_;
  absl::Mutex mutex_;
  std::set<std::string> changed_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<store::Store::Subscription> subscription_;
  std::thread thread_;
};

}  // namespace ringleader::trace
