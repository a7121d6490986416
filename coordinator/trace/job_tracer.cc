#include "coordinator/trace/job_tracer.h"

#include <spdlog/spdlog.h>

#include <utility>
#include <vector>

#include "base/status_macros.h"

namespace ringleader::trace {
namespace {

// A job that changes all the time is read once in this time.
constexpr absl::Duration kInterval = absl::Seconds(1);
// Jobs of one read transaction: a long one would keep the store's log of writes from being cut.
constexpr size_t kJobsAtOnce = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<JobTracer>> JobTracer::Start(const TraceOptions& options,
                                                            const ExportLimits& limits,
                                                            store::Store* store,
                                                            prometheus::Registry* registry) {
  ASSIGN_OR_RETURN(std::unique_ptr<Exporter> exporter, Exporter::Create(options, limits, registry));
  TraceBook book(options.step_interval);
  RETURN_IF_ERROR(store->Read([&](store::ReadTransaction& t) { return book.Adopt(t); }));
  std::unique_ptr<JobTracer> tracer(new JobTracer(std::move(book), std::move(exporter), store));
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
      mutex_.Await(absl::Condition(&due));
      jobs.swap(changed_);
    }
    Pass(jobs);
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(&stopping_), kInterval);
    stopping = stopping_ && changed_.empty();
  }
}

void JobTracer::Pass(const std::set<std::string>& jobs) {
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
    exporter_->Add(std::move(spans));
    if (read.ok()) continue;
    spdlog::warn("traces: {}", std::string(read.message()));
    absl::MutexLock lock(&mutex_);
    if (!stopping_) changed_.insert(next, jobs.end());  // for the next pass
    return;
  }
}

}  // namespace ringleader::trace
