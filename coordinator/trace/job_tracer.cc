#include "coordinator/trace/job_tracer.h"

#include <spdlog/spdlog.h>

#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "base/wait/timed_wait.h"

namespace ringleader::trace {
namespace {

// A job that changes all the time is read once in this time.
constexpr absl::Duration kInterval = absl::Seconds(1);
// Jobs of one read transaction: a long one would keep the store's log of writes from being cut.
constexpr size_t kJobsAtOnce = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<JobTracer>> JobTracer::Start(const TraceOptions& options,
                                                            const ExportLimits& limits,
                                                            const std::string& log,
                                                            store::Store* store, const Clock* clock,
                                                            prometheus::Registry* registry) {
  ASSIGN_OR_RETURN(std::unique_ptr<Exporter> exporter, Exporter::Create(options, limits, registry));
  absl::StatusOr<DeliveryLog> sent = DeliveryLog::Open(log, clock->Now());
  if (absl::IsDataLoss(sent.status())) {
    spdlog::warn("traces: {}; what an earlier coordinator had not sent is lost",
                 std::string(sent.status().message()));
    sent = DeliveryLog(log, clock->Now());
  }
  RETURN_IF_ERROR(sent.status());
  std::unique_ptr<JobTracer> tracer(new JobTracer(
      TraceBook(options.step_interval), *std::move(sent), std::move(exporter), store, clock));
  RETURN_IF_ERROR(tracer->Adopt());
  tracer->subscription_ = store->Subscribe([tracer = tracer.get()](const store::Change& change) {
    if (change.jobs.empty()) return;
    absl::MutexLock lock(&tracer->mutex_);
    tracer->changed_.insert(change.jobs.begin(), change.jobs.end());
  });
  tracer->thread_ = std::thread([tracer = tracer.get()] { tracer->Run(); });
  return tracer;
}

JobTracer::~JobTracer() {
  subscription_.reset();
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
  exporter_->Stop();
  Settle();
}

absl::Status JobTracer::Adopt() {
  std::vector<otlp::Span> spans;
  RETURN_IF_ERROR(
      store_.Read([&](store::ReadTransaction& t) { return book_.Adopt(t, log_.mark(), &spans); }));
  std::erase_if(spans, [this](const otlp::Span& span) { return log_.IsDone(span); });
  Send(std::move(spans));
  return absl::OkStatus();
}

void JobTracer::Run() {
  bool stopping = false;
  while (!stopping) {
    std::set<std::string> jobs;
    {
      absl::MutexLock lock(&mutex_);
      const auto due = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !changed_.empty();
      };
      AwaitFor(mutex_, absl::Condition(&due), log_.waits() ? kInterval : absl::InfiniteDuration());
      jobs.swap(changed_);
    }
    const absl::Time now = clock_.Now();
    if (Pass(jobs)) complete_until_ = now;
    Settle();
    absl::MutexLock lock(&mutex_);
    AwaitFor(mutex_, absl::Condition(&stopping_), kInterval);
    stopping = stopping_ && changed_.empty();
  }
}

bool JobTracer::Pass(const std::set<std::string>& jobs) {
  auto next = jobs.begin();
  while (next != jobs.end()) {
    std::vector<otlp::Span> spans;
    const absl::Status read = store_.Read([&](store::ReadTransaction& transaction) {
      for (size_t i = 0; i < kJobsAtOnce && next != jobs.end(); ++i, ++next) {
        const absl::Status collected = book_.Collect(transaction, *next, &spans);
        // A job whose record is damaged has no trace; others have.
        if (!collected.ok()) {
          spdlog::warn("traces: jobs/{}: {}", *next, std::string(collected.message()));
        }
      }
      return absl::OkStatus();
    });
    Send(std::move(spans));
    if (read.ok()) continue;
    spdlog::warn("traces: {}", std::string(read.message()));
    absl::MutexLock lock(&mutex_);
    if (!stopping_) changed_.insert(next, jobs.end());  // for the next pass
    return false;
  }
  return true;
}

void JobTracer::Send(std::vector<otlp::Span> spans) {
  std::vector<SpanEnd> ends;
  for (const otlp::Span& span : spans) ends.push_back({span.span_id(), span.end_time_unix_nano()});
  const size_t taken = exporter_->Add(std::move(spans));
  log_.Handed(std::move(ends), taken, complete_until_);
}

void JobTracer::Settle() {
  const absl::Status saved = log_.Settle(exporter_->settled(), complete_until_);
  if (!saved.ok() && !log_fails_) {
    spdlog::warn("traces: {}; what is sent from now on may be sent again after a restart",
                 std::string(saved.message()));
  }
  log_fails_ = !saved.ok();
}

}  // namespace ringleader::trace
