#include "coordinator/trace/trace_book.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "proto/states.h"
#include "proto/timestamps.h"

namespace ringleader::trace {
namespace {

constexpr int kJobsOfAPage = 500;

}  // namespace

absl::Status TraceBook::Adopt(store::ReadTransaction& transaction, absl::Time since,
                              std::vector<otlp::Span>* spans) {
  store::JobQuery query = {.limit = kJobsOfAPage};
  do {
    ASSIGN_OR_RETURN(const store::JobPage page, transaction.ListJobs(query));
    for (const v1::Job& listed : page.jobs) {
      newest_adopted_ = std::max(newest_adopted_, listed.sequence());
      if (IsTerminal(listed.state()) && ToTime(listed.end_time()) <= since) continue;
      const absl::Status adopted = AdoptJob(transaction, listed.spec().name(), spans);
      // A job whose record is damaged has no trace; others have.
      if (absl::IsDataLoss(adopted)) {
        spdlog::warn("traces: {}", std::string(adopted.message()));
      } else if (!adopted.ok()) {
        return adopted;
      }
    }
    for (const v1::Job& job : page.damaged) {
      newest_adopted_ = std::max(newest_adopted_, job.sequence());
      spdlog::warn("traces: {}", job.state_reason());
    }
    query.before_sequence = page.last_sequence;
  } while (query.before_sequence != 0);
  return absl::OkStatus();
}

absl::Status TraceBook::AdoptJob(store::ReadTransaction& transaction, const std::string& id,
                                 std::vector<otlp::Span>* spans) {
  ASSIGN_OR_RETURN(const v1::Job job, transaction.GetJob(id));
  Entry entry = {.uid = job.uid()};
  const size_t before = spans->size();
  if (const absl::Status advanced = Advance(transaction, job, &entry, spans); !advanced.ok()) {
    spans->resize(before);
    return advanced;
  }
  entries_[id] = std::move(entry);
  return absl::OkStatus();
}

absl::Status TraceBook::Collect(store::ReadTransaction& transaction, const std::string& id,
                                std::vector<otlp::Span>* spans) {
  const absl::StatusOr<v1::Job> job = transaction.GetJob(id);
  if (absl::IsNotFound(job.status())) {
    entries_.erase(id);
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(job.status());
  Entry entry;
  const auto known = entries_.find(id);
  if (known != entries_.end() && known->second.uid == job->uid()) {
    entry = known->second;
  } else {
    entry.uid = job->uid();
    // A job that had ended, and goes on: what it had come to was handed out then.
    const bool had_ended = job->sequence() <= newest_adopted_;
    for (const v1::Attempt& attempt : job->attempts()) {
      if (!had_ended || !attempt.has_end_time()) continue;
      entry = {.uid = job->uid(), .attempt = attempt.number(), .handed = {"attempt"}};
    }
  }
  const size_t before = spans->size();
  if (const absl::Status advanced = Advance(transaction, *job, &entry, spans); !advanced.ok()) {
    spans->resize(before);
    return advanced;
  }
  entries_[id] = std::move(entry);
  return absl::OkStatus();
}

absl::Status TraceBook::Advance(store::ReadTransaction& transaction, const v1::Job& job,
                                Entry* entry, std::vector<otlp::Span>* spans) const {
  const v1::Attempt* before = nullptr;
  for (const v1::Attempt& attempt : job.attempts()) {
    const v1::Attempt* const previous = std::exchange(before, &attempt);
    if (attempt.number() < entry->attempt) continue;
    if (attempt.number() > entry->attempt) {
      *entry = {.uid = entry->uid, .attempt = attempt.number()};
    }
    if (entry->handed.contains("attempt")) continue;  // late words change nothing
    if (&attempt == &*job.attempts().rbegin()) {
      RETURN_IF_ERROR(AdvanceSteps(transaction, job, entry, spans));
      RETURN_IF_ERROR(AdvanceCheckpoints(transaction, job, entry, spans));
    }
    for (otlp::Span& span : FinishedSpans(job, attempt, previous)) {
      if (entry->handed.insert(span.name()).second) spans->push_back(std::move(span));
    }
  }
  return absl::OkStatus();
}

absl::Status TraceBook::AdvanceSteps(store::ReadTransaction& transaction, const v1::Job& job,
                                     Entry* entry, std::vector<otlp::Span>* spans) const {
  const v1::Attempt& attempt = *job.attempts().rbegin();
  if (attempt.last_step() <= entry->last_step) return absl::OkStatus();
  entry->last_step = attempt.last_step();
  const absl::StatusOr<v1::StepReport> step =
      transaction.GetStep(job.spec().name(), attempt.last_step());
  if (absl::IsNotFound(step.status())) return absl::OkStatus();  // of a job whose reports are gone
  RETURN_IF_ERROR(step.status());
  if (ToTime(step->time()) < entry->step_due) return absl::OkStatus();
  entry->step_due = ToTime(step->time()) + step_interval_;
  spans->push_back(StepSpan(job, attempt, *step));
  return absl::OkStatus();
}

absl::Status TraceBook::AdvanceCheckpoints(store::ReadTransaction& transaction, const v1::Job& job,
                                           Entry* entry, std::vector<otlp::Span>* spans) const {
  // An attempt that went on from an older checkpoint may save steps again.
  ASSIGN_OR_RETURN(const std::vector<v1::CheckpointNotice> notices,
                   transaction.ListCheckpoints(job.spec().name()));
  uint64_t newest = entry->checkpoint_step;
  for (const v1::CheckpointNotice& notice : notices) {
    if (notice.attempt() != entry->attempt || notice.step() <= entry->checkpoint_step) continue;
    spans->push_back(CheckpointSpan(job, notice));
    newest = std::max(newest, notice.step());
  }
  entry->checkpoint_step = newest;
  return absl::OkStatus();
}

}  // namespace ringleader::trace
