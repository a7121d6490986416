#include "coordinator/access/audit_log.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/timestamps.h"

namespace ringleader::access {
namespace {

constexpr size_t kMaxQueued = 4096;
constexpr size_t kMaxMessageBytes = 500;
// Of calls that are turned away: 1000 at once, then one in ten seconds, some 3 MB a day.
constexpr double kBurst = 1000;
constexpr absl::Duration kSecondsPerRecord = absl::Seconds(10);
constexpr absl::Duration kTrimInterval = absl::Hours(1);
constexpr absl::Duration kLookForSpace = absl::Seconds(1);

}  // namespace

std::string OutcomeText(absl::StatusCode code) {
  return absl::StatusCodeToString(code);
}

AuditLog::AuditLog(store::Store* store, const Clock* clock, absl::Duration max_age)
    : store_(*store),
      clock_(*clock),
      max_age_(max_age),
      allowance_(kBurst),
      allowance_time_(clock->Now()),
      thread_([this] { Run(); }) {}

AuditLog::~AuditLog() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void AuditLog::Note(v1::AuditRecord record, const absl::Status& status) {
  record.set_outcome(OutcomeText(status.code()));
  record.set_message(absl::CHexEscape(std::string(status.message().substr(0, kMaxMessageBytes)))
                         .substr(0, kMaxMessageBytes));
  absl::MutexLock lock(&mutex_);
  Push(std::move(record));
}

void AuditLog::NoteTurnedAway(v1::AuditRecord record, const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    const absl::Time now = clock_.Now();
    allowance_ = std::clamp(
        allowance_ + absl::FDivDuration(now - allowance_time_, kSecondsPerRecord), 0.0, kBurst);
    allowance_time_ = now;
    if (allowance_ < 1) {
      ++left_out_;
      return;
    }
    allowance_ -= 1;
  }
  Note(std::move(record), status);
}

void AuditLog::Push(v1::AuditRecord record) {
  if (queue_.size() >= kMaxQueued) {
    ++left_out_;
    return;
  }
  SetTime(clock_.Now(), record.mutable_time());
  queue_.push_back(std::move(record));
}

void AuditLog::Run() {
  absl::Time next_trim = absl::InfinitePast();
  for (bool last = false; !last;) {
    std::vector<v1::AuditRecord> records;
    uint64_t left_out = 0;
    {
      absl::MutexLock lock(&mutex_);
      const auto something = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !queue_.empty();
      };
      mutex_.AwaitWithTimeout(absl::Condition(&something), absl::Minutes(1));
      last = stopping_;
      // Records wait for space as long as there is room for them here.
      if (!last && !store_.Space().ok()) {
        mutex_.AwaitWithTimeout(absl::Condition(&stopping_), kLookForSpace);
        continue;
      }
      records.swap(queue_);
      left_out = std::exchange(left_out_, 0);
    }
    if (!records.empty() || left_out > 0) Write(std::move(records), left_out);
    if (clock_.Now() < next_trim) continue;
    next_trim = clock_.Now() + kTrimInterval;
    const absl::Time oldest = clock_.Now() - max_age_;
    const absl::Status trimmed =
        store_.Write([&](store::WriteTransaction& t) { return t.TrimAudit(oldest); });
    if (!trimmed.ok()) spdlog::warn("audit log: {}", std::string(trimmed.message()));
  }
}

void AuditLog::Write(std::vector<v1::AuditRecord> records, uint64_t left_out) {
  if (left_out > 0) {
    v1::AuditRecord& note = records.emplace_back();
    note.set_outcome(OutcomeText(absl::StatusCode::kResourceExhausted));
    note.set_message(absl::StrCat(left_out, " more calls were refused than are noted"));
  }
  const absl::Status written = store_.Write([&](store::WriteTransaction& t) -> absl::Status {
    for (const v1::AuditRecord& record : records) RETURN_IF_ERROR(t.AppendAudit(record));
    return absl::OkStatus();
  });
  if (written.ok()) return;
  spdlog::error("{} records of the audit log are lost: {}", records.size(),
                std::string(written.message()));
}

}  // namespace ringleader::access
