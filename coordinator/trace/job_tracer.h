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
#include "coordinator/store/store.h"
#include "coordinator/trace/exporter.h"
#include "coordinator/trace/trace_book.h"
#include "coordinator/trace/trace_options.h"

namespace ringleader::trace {

// Thread-safe.
class JobTracer {
 public:
  // What the store says to be over before this call is not sent: an earlier coordinator has. So
  // call it before anything is decided. Both pointers must outlive the tracer. INVALID_ARGUMENT
  // names the flag that is wrong.
  static absl::StatusOr<std::unique_ptr<JobTracer>> Start(const TraceOptions& options,
                                                          const ExportLimits& limits,
                                                          store::Store* store,
                                                          prometheus::Registry* registry);
  ~JobTracer();

 private:
  JobTracer(TraceBook book, std::unique_ptr<Exporter> exporter, store::Store* store)
      : store_(*store), book_(std::move(book)), exporter_(std::move(exporter)) {}
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  void Pass(const std::set<std::string>& jobs);

  store::Store& store_;
  TraceBook book_;  // of the thread alone
  const std::unique_ptr<Exporter> exporter_;
  absl::Mutex mutex_;
  std::set<std::string> changed_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<store::Store::Subscription> subscription_;
  std::thread thread_;
};

}  // namespace ringleader::trace
