#include "coordinator/trace/exporter.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/back_off.h"
#include "base/boot_clock.h"
#include "base/net/channel.h"
#include "base/process/version.h"
#include "base/status_macros.h"
#include "base/wait/timed_wait.h"

namespace ringleader::trace {
namespace {

constexpr absl::Duration kLongestPause = absl::Seconds(10);
// An answer says how many spans were refused; a longer one is none.
constexpr int kMaxAnswerBytes = 64 << 10;
constexpr size_t kMaxProblemBytes = 300;

void SetAttribute(const std::string& key, const std::string& value, otlp::Resource* resource) {
  otlp::KeyValue* const attribute = resource->add_attributes();
  attribute->set_key(key);
  attribute->mutable_value()->set_string_value(value);
}

// Who sends, by OpenTelemetry's names.
otlp::ResourceSpans Sender() {
  otlp::ResourceSpans spans;
  SetAttribute("service.name", "ringleader-coordinator", spans.mutable_resource());
  SetAttribute("service.version", std::string(kVersion), spans.mutable_resource());
  char host[256] = "";
  if (gethostname(host, sizeof(host) - 1) == 0) {
    SetAttribute("host.name", host, spans.mutable_resource());
  }
  otlp::Scope* const scope = spans.add_scope_spans()->mutable_scope();
  scope->set_name("ringleader");
  scope->set_version(std::string(kVersion));
  return spans;
}

// OTLP's own list. RESOURCE_EXHAUSTED: only where the collector says when.
bool MayBeSentAgain(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::OUT_OF_RANGE:
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DATA_LOSS:
      return true;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return absl::StrContains(status.error_details(), "google.rpc.RetryInfo");
    default:
      return false;
  }
}

// Errors of TLS name the flags of the coordinator's own port.
std::string ByFlagsOfTraces(const std::string& message) {
  return absl::StrReplaceAll(message, {{"--tls-", "--trace-tls-"}});
}

}  // namespace

struct Exporter::Counters {
  explicit Counters(prometheus::Registry* registry)
      : queued(prometheus::BuildGauge()
                   .Name("ringleader_coordinator_trace_queued_spans")
                   .Help("Spans that wait to be sent to the collector of traces")
                   .Register(*registry)
                   .Add({})),
        exported(prometheus::BuildCounter()
                     .Name("ringleader_coordinator_trace_spans_exported_total")
                     .Help("Spans that the collector of traces took")
                     .Register(*registry)
                     .Add({})),
        dropped(prometheus::BuildCounter()
                    .Name("ringleader_coordinator_trace_spans_dropped_total")
                    .Help("Spans that were lost, by reason")
                    .Register(*registry)) {}

  prometheus::Gauge& queued;
  prometheus::Counter& exported;
  prometheus::Family<prometheus::Counter>& dropped;
  prometheus::Counter& queue_full = dropped.Add({{"reason", "queue_full"}});    // faster than sent
  prometheus::Counter& refused = dropped.Add({{"reason", "refused"}});          // by the collector
  prometheus::Counter& unreachable = dropped.Add({{"reason", "unreachable"}});  // limits.give_up
};

absl::StatusOr<std::unique_ptr<Exporter>> Exporter::Create(const TraceOptions& options,
                                                           const ExportLimits& limits,
                                                           prometheus::Registry* registry) {
  ASSIGN_OR_RETURN(const Collector collector, CollectorOf(options));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxAnswerBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(limits.keepalive_interval)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(limits.keepalive_patience)));
  // A call must end with its deadline, and be tried again here alone.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel =
      OpenChannel(collector.address, collector.tls, "", arguments);
  if (!channel.ok()) {
    return absl::Status(channel.status().code(),
                        ByFlagsOfTraces(std::string(channel.status().message())));
  }
  return std::unique_ptr<Exporter>(
      new Exporter(options.endpoint, limits, otlp::TraceService::NewStub(*channel), registry));
}

Exporter::Exporter(std::string endpoint, const ExportLimits& limits,
                   std::unique_ptr<otlp::TraceService::StubInterface> collector,
                   prometheus::Registry* registry)
    : endpoint_(std::move(endpoint)),
      limits_(limits),
      collector_(std::move(collector)),
      counters_(std::make_unique<Counters>(registry)),
      thread_([this] { Run(); }) {}

Exporter::~Exporter() {
  Stop();
}

size_t Exporter::Add(std::vector<otlp::Span> spans) {
  absl::MutexLock lock(&mutex_);
  if (stopping_) return 0;
  const size_t room = limits_.queue_spans - queue_.size();
  const size_t taken = std::min(room, spans.size());
  std::move(spans.begin(), spans.begin() + static_cast<ptrdiff_t>(taken),
            std::back_inserter(queue_));
  counters_->queue_full.Increment(static_cast<double>(spans.size() - taken));
  counters_->queued.Set(static_cast<double>(queue_.size()));
  return taken;
}

uint64_t Exporter::settled() const {
  absl::MutexLock lock(&mutex_);
  return settled_;
}

void Exporter::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    if (!stopping_) end_ = BootNow() + limits_.at_end;
    stopping_ = true;
    if (!AwaitFor(mutex_, absl::Condition(&done_), end_ - BootNow()) && call_ != nullptr) {
      call_->TryCancel();
    }
  }
  if (thread_.joinable()) thread_.join();
}

void Exporter::Run() {
  while (true) {
    std::vector<otlp::Span> batch;
    {
      absl::MutexLock lock(&mutex_);
      const auto due = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !queue_.empty();
      };
      mutex_.Await(absl::Condition(&due));
      if (queue_.empty() || BootNow() >= end_) {
        done_ = true;
        return;
      }
      const auto end =
          queue_.begin() + static_cast<ptrdiff_t>(std::min(limits_.batch_spans, queue_.size()));
      std::move(queue_.begin(), end, std::back_inserter(batch));
      queue_.erase(queue_.begin(), end);
      counters_->queued.Set(static_cast<double>(queue_.size()));
    }
    const size_t count = batch.size();
    const bool is_settled = Send(std::move(batch));
    absl::MutexLock lock(&mutex_);
    if (!is_settled) {
      done_ = true;
      return;
    }
    settled_ += count;
  }
}

bool Exporter::Send(std::vector<otlp::Span> batch) {
  const auto count = static_cast<int64_t>(batch.size());
  otlp::ExportTraceServiceRequest request;
  *request.add_resource_spans() = Sender();
  otlp::ScopeSpans* const scope = request.mutable_resource_spans(0)->mutable_scope_spans(0);
  for (otlp::Span& span : batch) *scope->add_spans() = std::move(span);

  const absl::Time give_up = BootNow() + limits_.give_up;
  for (uint32_t tries = 1;; ++tries) {
    otlp::ExportTraceServiceResponse response;
    const grpc::Status status =
        Call(request, std::min(give_up, BootNow() + limits_.call), &response);
    if (status.ok()) {
      const int64_t refused =
          std::clamp<int64_t>(response.partial_success().rejected_spans(), 0, count);
      counters_->exported.Increment(static_cast<double>(count - refused));
      counters_->refused.Increment(static_cast<double>(refused));
      Note(refused == 0 ? ""
                        : absl::StrCat("it refused ", refused, " of ", count,
                                       " spans: ", response.partial_success().error_message()));
      return true;
    }
    const std::string why = ByFlagsOfTraces(ExplainConnection(status.error_message()));
    Note(why.empty() ? absl::StrCat("gRPC status ", static_cast<int>(status.error_code())) : why);
    if (!MayBeSentAgain(status)) {
      counters_->refused.Increment(static_cast<double>(count));
      return true;
    }
    const absl::Duration pause = BackOff(limits_.first_pause, kLongestPause, tries);
    const absl::Time again = BootNow() + pause;
    absl::MutexLock lock(&mutex_);
    const auto ends = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return stopping_ && again >= end_;
    };
    if (AwaitFor(mutex_, absl::Condition(&ends), pause)) return false;
    if (again >= give_up) {
      counters_->unreachable.Increment(static_cast<double>(count));
      return true;
    }
  }
}

grpc::Status Exporter::Call(const otlp::ExportTraceServiceRequest& request, absl::Time deadline,
                            otlp::ExportTraceServiceResponse* response) {
  grpc::ClientContext context;
  {
    absl::MutexLock lock(&mutex_);
    context.set_deadline(std::chrono::system_clock::now() +
                         absl::ToChronoNanoseconds(std::min(deadline, end_) - BootNow()));
    call_ = &context;
  }
  const grpc::Status status = collector_->Export(&context, request, response);
  absl::MutexLock lock(&mutex_);
  call_ = nullptr;
  return status;
}

void Exporter::Note(const std::string& problem) {
  const bool failing = !problem.empty();
  if (failing == failing_) return;
  failing_ = failing;
  if (failing) {
    spdlog::warn(
        "traces: {} does not take them: {}; what it does not take in time is lost, and "
        "counted in ringleader_coordinator_trace_spans_dropped_total",
        endpoint_, problem.substr(0, kMaxProblemBytes));
  } else {
    spdlog::info("traces: {} takes them", endpoint_);
  }
}

}  // namespace ringleader::trace
