#include "coordinator/store/upkeep/retention.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "base/status_macros.h"
#include "proto/timestamps.h"

namespace ringleader::store {
namespace {

constexpr int kJobsPerPage = 200;

// Ids of the jobs in `state` that ended before `time`.
absl::StatusOr<std::vector<std::string>> EndedBefore(Store& store, const char* state,
                                                     absl::Time time) {
  std::vector<std::string> ids;
  JobQuery query = {.terms = {{.value = state}}, .limit = kJobsPerPage};
  do {
    JobPage page;
    RETURN_IF_ERROR(store.Read([&](ReadTransaction& t) -> absl::Status {
      ASSIGN_OR_RETURN(page, t.ListJobs(query));
      return absl::OkStatus();
    }));
    for (const v1::Job& job : page.jobs) {
      if (job.has_end_time() && ToTime(job.end_time()) < time) ids.push_back(job.spec().name());
    }
    query.before_sequence = page.last_sequence;
  } while (query.before_sequence != 0);
  return ids;
}

}  // namespace

absl::StatusOr<int> DeleteOld(Store& store, absl::Time now, const RetentionOptions& options) {
  int touched = 0;
  for (const char* state : {"CANCELLED", "SUCCEEDED", "FAILED"}) {
    ASSIGN_OR_RETURN(const std::vector<std::string> ids,
                     EndedBefore(store, state, now - options.events));
    for (const std::string& id : ids) {
      bool changed = false;
      // Vital, because it makes room.
      RETURN_IF_ERROR(store.Write(
          [&](WriteTransaction& t) -> absl::Status {
            const absl::StatusOr<v1::Job> job = t.GetJob(id);
            if (absl::IsNotFound(job.status())) return absl::OkStatus();
            if (!job.ok()) return job.status();
            // Somebody may have put another job in its place since.
            if (!job->has_end_time()) return absl::OkStatus();
            const absl::Time end = ToTime(job->end_time());
            if (end < now - options.jobs) {
              changed = true;
              return t.DeleteJob(id);
            }
            if (end >= now - options.events) return absl::OkStatus();
            ASSIGN_OR_RETURN(changed, t.DeleteReports(id));
            return absl::OkStatus();
          },
          Need::kVital));
      if (changed) ++touched;
    }
  }
  return touched;
}

Retention::Retention(Store* store, const Clock* time_of_day, const Clock* steady,
                     const RetentionOptions& options)
    : store_(*store),
      time_of_day_(*time_of_day),
      steady_(*steady),
      options_(options),
      thread_([this] { Run(); }) {}

Retention::~Retention() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void Retention::Run() {
  absl::MutexLock lock(&mutex_);
  while (!mutex_.AwaitWithTimeout(absl::Condition(&stopping_), options_.interval)) {
    mutex_.Unlock();
    const absl::Time now = std::min(time_of_day_.Now(), steady_.Now());
    const absl::StatusOr<int> deleted = DeleteOld(store_, now, options_);
    if (!deleted.ok()) {
      spdlog::warn("old jobs: {}", std::string(deleted.status().message()));
    } else if (*deleted > 0) {
      spdlog::info("{} jobs ended so long ago that their reports, or they themselves, went",
                   *deleted);
    }
    mutex_.Lock();
  }
}

}  // namespace ringleader::store
