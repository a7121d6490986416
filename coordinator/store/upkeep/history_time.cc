#include "coordinator/store/upkeep/history_time.h"

#include <algorithm>
#include <vector>

#include "base/status_macros.h"
#include "proto/timestamps.h"

namespace ringleader::store {
namespace {

// More than one, so that what passed while no coordinator ran is made good.
constexpr int kPace = 2;

// When the newest job was created, or the newest call noted, of which that can be read.
absl::StatusOr<absl::Time> NewestRecord(ReadTransaction& transaction) {
  absl::Time newest = absl::InfinitePast();
  JobQuery query = {.limit = 1};
  do {
    ASSIGN_OR_RETURN(const JobPage page, transaction.ListJobs(query));
    for (const v1::Job& job : page.jobs) newest = std::max(newest, ToTime(job.create_time()));
    query.before_sequence = page.last_sequence;
  } while (newest == absl::InfinitePast() && query.before_sequence != 0);
  const absl::StatusOr<AuditPage> audit = transaction.ListAudit({.limit = 1});
  if (absl::IsDataLoss(audit.status())) return newest;
  RETURN_IF_ERROR(audit.status());
  for (const v1::AuditRecord& record : audit->records) {
    newest = std::max(newest, ToTime(record.time()));
  }
  return newest;
}

}  // namespace

HistoryTime::HistoryTime(Store* store, const Clock* time_of_day, const Clock* steady)
    : store_(*store), time_of_day_(*time_of_day), steady_(*steady), advanced_(steady->Now()) {}

absl::Status HistoryTime::Begin() {
  return store_.Write(
      [&](WriteTransaction& t) -> absl::Status {
        ASSIGN_OR_RETURN(const absl::Time kept, t.GetHistoryTime());
        if (kept != absl::InfinitePast()) return absl::OkStatus();
        ASSIGN_OR_RETURN(const absl::Time newest, NewestRecord(t));
        if (newest == absl::InfinitePast()) return absl::OkStatus();
        return t.SetHistoryTime(std::min(newest, time_of_day_.Now()));
      },
      Need::kVital);
}

absl::StatusOr<absl::Time> HistoryTime::Advance() {
  RETURN_IF_ERROR(Begin());
  const absl::Time now = time_of_day_.Now(), steady = steady_.Now();
  absl::Time time = absl::InfinitePast();
  RETURN_IF_ERROR(store_.Write(
      [&](WriteTransaction& t) -> absl::Status {
        ASSIGN_OR_RETURN(const absl::Time kept, t.GetHistoryTime());
        if (kept == absl::InfinitePast()) return absl::OkStatus();
        const absl::Duration most = kPace * std::max(absl::ZeroDuration(), steady - advanced_);
        // Back, too, lest a time of day that was once far ahead allow a leap for good.
        time = std::clamp(now, kept - most, kept + most);
        return time == kept ? absl::OkStatus() : t.SetHistoryTime(time);
      },
      Need::kVital));
  advanced_ = steady;
  return std::min(time, now);
}

}  // namespace ringleader::store
