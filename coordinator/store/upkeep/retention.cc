#include "coordinator/store/upkeep/retention.h"

#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "base/numbers/finite_number.h"
#include "base/status_macros.h"
#include "base/wait/timed_wait.h"
#include "proto/timestamps.h"

namespace ringleader::store {
namespace {

constexpr int kJobsPerPage = 200;

void AddDays(CLI::App& app, const std::string& name, const std::string& help,
             absl::Duration* duration) {
  app.add_option_function<int64_t>(
         name, [duration](const int64_t& days) { *duration = absl::Hours(24 * days); }, help)
      ->check(CLI::Range(1, 36500))
      ->type_name("DAYS")
      ->default_str(absl::StrCat(*duration / absl::Hours(24)));
}

// Ids of the jobs in `state` that ended before `time`. Adds what is wrong with those of which that
// cannot be told.
absl::StatusOr<std::vector<std::string>> EndedBefore(Store& store, const char* state,
                                                     absl::Time time,
                                                     std::vector<std::string>* damage) {
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
    for (const v1::Job& job : page.damaged) damage->push_back(job.state_reason());
    query.before_sequence = page.last_sequence;
  } while (query.before_sequence != 0);
  return ids;
}

}  // namespace

void AddRetentionFlags(CLI::App& app, RetentionOptions* options) {
  AddDays(app, "--keep-events",
          "days that the logs, steps and evaluations of a job are kept after its end",
          &options->events);
  AddDays(app, "--keep-jobs", "days that a job is kept after its end; not less than --keep-events",
          &options->jobs);
  AddDays(app, "--audit-days", "days that the audit log keeps a record", &options->audit);
  app.add_option_function<double>(
         "--retention-interval",
         [options](const double& seconds) { options->interval = absl::Seconds(seconds); },
         "how often what is too old is looked for")
      ->check(UsableSeconds())
      ->type_name("SECONDS")
      ->default_str(absl::StrCat(absl::ToDoubleSeconds(options->interval)));
}

absl::Status Validate(const RetentionOptions& options) {
  if (options.jobs >= options.events) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--keep-jobs must not be less than --keep-events: what a job reported goes with it");
}

absl::StatusOr<Deleted> DeleteOld(Store& store, absl::Time now, const RetentionOptions& options) {
  RETURN_IF_ERROR(store.Write([&](WriteTransaction& t) { return t.TrimAudit(now - options.audit); },
                              Need::kVital));
  Deleted deleted;
  for (const char* state : {"CANCELLED", "SUCCEEDED", "FAILED"}) {
    ASSIGN_OR_RETURN(const std::vector<std::string> ids,
                     EndedBefore(store, state, now - options.events, &deleted.damage));
    for (const std::string& id : ids) {
      bool changed = false;
      // Vital, because it makes room.
      RETURN_IF_ERROR(store.Write(
          [&](WriteTransaction& t) -> absl::Status {
            // Its attempts, which may be damaged, do not matter.
            ASSIGN_OR_RETURN(
                const JobPage page,
                t.ListJobs({.terms = {{.field = JobTerm::Field::kName, .value = id}}, .limit = 1}));
            // Somebody may have deleted it, or put another job in its place, since.
            if (page.jobs.empty() || !page.jobs[0].has_end_time()) return absl::OkStatus();
            const absl::Time end = ToTime(page.jobs[0].end_time());
            if (end < now - options.jobs) {
              changed = true;
              return t.DeleteJob(id);
            }
            if (end >= now - options.events) return absl::OkStatus();
            ASSIGN_OR_RETURN(changed, t.DeleteReports(id));
            return absl::OkStatus();
          },
          Need::kVital));
      if (changed) ++deleted.jobs;
    }
  }
  return deleted;
}

Retention::Retention(Store* store, const Clock* time_of_day, const Clock* steady,
                     const RetentionOptions& options)
    : store_(*store), time_(store, time_of_day, steady), options_(options) {
  if (const absl::Status begun = time_.Begin(); !begun.ok()) {
    spdlog::warn("what is old: {}", std::string(begun.message()));
  }
  thread_ = std::thread([this] { Run(); });
}

Retention::~Retention() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void Retention::Run() {
  absl::MutexLock lock(&mutex_);
  while (!AwaitFor(mutex_, absl::Condition(&stopping_), options_.interval)) {
    mutex_.Unlock();
    Sweep();
    mutex_.Lock();
  }
}

void Retention::Sweep() {
  const absl::StatusOr<absl::Time> now = time_.Advance();
  const absl::StatusOr<Deleted> deleted =
      now.ok() ? DeleteOld(store_, *now, options_) : absl::StatusOr<Deleted>(now.status());
  if (!deleted.ok()) {
    spdlog::warn("what is old: {}", std::string(deleted.status().message()));
    return;
  }
  for (const std::string& damage : deleted->damage) {
    if (told_damage_.insert(damage).second) {
      spdlog::error("what is old: {}; until then nothing of this job goes", damage);
    }
  }
  if (deleted->jobs > 0) {
    spdlog::info("{} jobs ended so long ago that their reports, or they themselves, went",
                 deleted->jobs);
  }
}

}  // namespace ringleader::store
