// Sends spans to a collector of OpenTelemetry's, by OTLP over gRPC. Whatever the collector does,
// whoever hands spans over never waits for it: what cannot be sent in time is dropped, and counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "coordinator/trace/trace_options.h"
#include "opentelemetry/trace_service.grpc.pb.h"

namespace grpc {
class ClientContext;
}
namespace prometheus {
class Registry;
}

namespace ringleader::trace {

namespace otlp = ::opentelemetry::proto::collector::trace::v1;

struct ExportLimits {
  size_t queue_spans = 16384;  // some 1 KB each; what comes beyond them is dropped
  size_t batch_spans = 512;    // of one call
  absl::Duration call = absl::Seconds(10);
  // A batch that the collector did not answer, or asked to be sent again, is sent again for so
  // long.
  absl::Duration give_up = absl::Minutes(1);
  absl::Duration first_pause = absl::Seconds(1);  // doubles with each try
  // A collector's machine that is gone without a word is found after the two together, and looked
  // for anew.
  absl::Duration keepalive_interval = absl::Seconds(20);
  absl::Duration keepalive_patience = absl::Seconds(10);
  absl::Duration at_end = absl::Seconds(2);  // Stop() tries to send what is left for so long
};

// Thread-safe.
class Exporter {
 public:
  // Connects when there is something to send. INVALID_ARGUMENT names the flag that is wrong.
  static absl::StatusOr<std::unique_ptr<Exporter>> Create(const TraceOptions& options,
                                                          const ExportLimits& limits,
                                                          prometheus::Registry* registry);
  ~Exporter();

  // Takes as many of the first as there is room for, and drops the rest. Returns how many it took:
  // none after Stop(), which drops none either. Never waits.
  size_t Add(std::vector<otlp::Span> spans) ABSL_LOCKS_EXCLUDED(mutex_);
  // How many of those that it took the collector took or refused, or were given up, in order.
  uint64_t settled() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns after limits.at_end and a little, at the latest. What is left then is not settled.
  // Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Counters;

  Exporter(std::string endpoint, const ExportLimits& limits,
           std::unique_ptr<otlp::TraceService::StubInterface> collector,
           prometheus::Registry* registry);
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Sends the batch until it is taken, refused or given up, and counts what became of it; until
  // Stop() has no more time for it: then false.
  bool Send(std::vector<otlp::Span> batch) ABSL_LOCKS_EXCLUDED(mutex_);
  // One call, no longer than until `deadline`.
  grpc::Status Call(const otlp::ExportTraceServiceRequest& request, absl::Time deadline,
                    otlp::ExportTraceServiceResponse* response) ABSL_LOCKS_EXCLUDED(mutex_);
  // Logs when the collector begins to fail, and when it is well again.
  void Note(const std::string& problem);

  const std::string endpoint_;
  const ExportLimits limits_;
  const std::unique_ptr<otlp::TraceService::StubInterface> collector_;
  const std::unique_ptr<Counters> counters_;

  mutable absl::Mutex mutex_;
  std::deque<otlp::Span> queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t settled_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time end_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mutex_) = nullptr;  // under way
  bool failing_ = false;                                         // of the thread alone
  std::thread thread_;
};

}  // namespace ringleader::trace
