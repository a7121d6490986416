#include "coordinator/access/audit_log.h"

#include <google/protobuf/stubs/common.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text/controls.h"
#include "base/text/utf8.h"
#include "base/wait/timed_wait.h"
#include "proto/timestamps.h"

namespace ringleader::access {
namespace {

constexpr size_t kMaxQueued = 4096;
constexpr size_t kMaxMessageBytes = 500;
// What a caller may have noted: 1000 records at once, then one in ten seconds, some 3 MB a day.
constexpr double kBurst = 1000;
constexpr absl::Duration kTimePerRecord = absl::Seconds(10);
// Names come from certificates and tokens, so that there are only as many as operators made.
constexpr size_t kMaxAllowances = 10'000;
constexpr absl::Duration kLookForSpace = absl::Seconds(1);

}  // namespace

std::string OutcomeText(absl::StatusCode code) {
  return absl::StatusCodeToString(code);
}

std::string RecordText(std::string_view text, size_t most) {
  const std::string_view part = WholeCharacters(text, most);
  const bool is_utf8 = google::protobuf::internal::IsStructurallyValidUTF8(
      part.data(), static_cast<int>(part.size()));
  const std::string shown = is_utf8 ? EscapeControls(part) : absl::CHexEscape(std::string(part));
  return std::string(WholeCharacters(shown, most));
}

AuditLog::AuditLog(store::Store* store, const Clock* clock)
    : store_(*store), clock_(*clock), thread_([this] { Run(); }) {}

AuditLog::~AuditLog() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void AuditLog::Note(v1::AuditRecord record, const absl::Status& status) {
  record.set_outcome(OutcomeText(status.code()));
  record.set_message(RecordText(std::string(status.message()), kMaxMessageBytes));
  absl::MutexLock lock(&mutex_);
  if (Spend(record.caller())) {
    Push(std::move(record));
  } else {
    ++left_out_;
  }
}

size_t AuditLog::allowances() const {
  absl::MutexLock lock(&mutex_);
  return allowances_.size();
}

bool AuditLog::Spend(const std::string& caller) {
  const absl::Time now = clock_.Now();
  if (allowances_.size() >= kMaxAllowances) {
    std::erase_if(allowances_, [&](const auto& entry) {
      return now - entry.second.counted >= kBurst * kTimePerRecord;  // full again
    });
  }
  const auto [found, is_new] = allowances_.try_emplace(caller, Allowance{kBurst, now});
  Allowance& allowance = found->second;
  const double earned = absl::FDivDuration(now - allowance.counted, kTimePerRecord);
  allowance = {std::clamp(allowance.records + earned, 0.0, kBurst), now};
  if (allowance.records < 1) return false;
  allowance.records -= 1;
  return true;
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
  for (bool last = false; !last;) {
    std::vector<v1::AuditRecord> records;
    uint64_t left_out = 0;
    {
      absl::MutexLock lock(&mutex_);
      const auto something = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !queue_.empty();
      };
      AwaitFor(mutex_, absl::Condition(&something), absl::Minutes(1));
      last = stopping_;
      // Records wait for space as long as there is room for them here.
      if (!last && !store_.Space().ok()) {
        AwaitFor(mutex_, absl::Condition(&stopping_), kLookForSpace);
        continue;
      }
      records.swap(queue_);
      left_out = std::exchange(left_out_, 0);
    }
    if (!records.empty() || left_out > 0) Write(std::move(records), left_out);
  }
}

void AuditLog::Write(std::vector<v1::AuditRecord> records, uint64_t left_out) {
  if (left_out > 0) {
    v1::AuditRecord& note = records.emplace_back();
    note.set_outcome(OutcomeText(absl::StatusCode::kResourceExhausted));
    note.set_message(absl::StrCat(left_out, " more calls failed or were refused than are noted"));
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
