#include "coordinator/trace/attempt_spans.h"

#include <google/protobuf/descriptor.h>
#include <openssl/sha.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "proto/timestamps.h"

namespace ringleader::trace {
namespace {

using otlp::Span;
using v1::Attempt;

constexpr size_t kTraceIdBytes = 16;
constexpr size_t kSpanIdBytes = 8;
constexpr char kRoot[] = "attempt";

std::string Hash(const std::string& text, size_t bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest);
  return std::string(reinterpret_cast<const char*>(digest), bytes);
}

std::string TraceId(const v1::Job& job, uint32_t attempt) {
  return Hash(absl::StrCat("attempt ", attempt, " of ", job.uid()), kTraceIdBytes);
}

std::string SpanId(const std::string& trace_id, const std::string& what) {
  return Hash(absl::StrCat(trace_id, what), kSpanIdBytes);
}

void Set(Span* span, const std::string& key, const std::string& value) {
  if (value.empty()) return;
  otlp::KeyValue* const attribute = span->add_attributes();
  attribute->set_key(key);
  attribute->mutable_value()->set_string_value(value);
}

void Set(Span* span, const std::string& key, uint64_t value) {
  otlp::KeyValue* const attribute = span->add_attributes();
  attribute->set_key(key);
  attribute->mutable_value()->set_int_value(static_cast<int64_t>(value));
}

void SetSeconds(Span* span, const std::string& key, double value) {
  otlp::KeyValue* const attribute = span->add_attributes();
  attribute->set_key(key);
  attribute->mutable_value()->set_double_value(value);
}

uint64_t Nanoseconds(absl::Time time) {
  return static_cast<uint64_t>(std::max<int64_t>(absl::ToUnixNanos(time), 0));
}

// Clocks of several machines meet here: no span ends before it begins.
void SetTimes(absl::Time begin, absl::Time end, Span* span) {
  span->set_start_time_unix_nano(Nanoseconds(begin));
  span->set_end_time_unix_nano(Nanoseconds(std::max(begin, end)));
}

// `which`: tells spans of one name apart.
Span Child(const v1::Job& job, uint32_t attempt, const std::string& name, uint64_t which = 0) {
  Span span;
  span.set_trace_id(TraceId(job, attempt));
  span.set_span_id(SpanId(span.trace_id(), absl::StrCat(name, " ", which)));
  span.set_parent_span_id(SpanId(span.trace_id(), kRoot));
  span.set_name(name);
  span.set_kind(Span::INTERNAL);
  Set(&span, "ringleader.job", job.spec().name());
  Set(&span, "ringleader.attempt", attempt);
  return span;
}

bool Failed(const Attempt& attempt) {
  return attempt.state() == Attempt::FAILED || attempt.state() == Attempt::FENCED;
}

void SetFailure(const Attempt& attempt, Span* span) {
  if (!Failed(attempt)) return;
  span->mutable_status()->set_code(otlp::Status::ERROR);
  span->mutable_status()->set_message(attempt.state_reason());
}

struct Phase {
  const char* name;
  bool begun;
  absl::Time begin;
  bool over;
  absl::Time end;
};

// What had begun when the attempt ended, ended with it.
void AddPhase(const v1::Job& job, const Attempt& attempt, const Phase& phase,
              std::vector<Span>* spans) {
  if (!phase.begun || (!phase.over && !attempt.has_end_time())) return;
  Span span = Child(job, attempt.number(), phase.name);
  SetTimes(phase.begin, phase.over ? phase.end : ToTime(attempt.end_time()), &span);
  if (!phase.over) SetFailure(attempt, &span);
  spans->push_back(std::move(span));
}

bool Recovers(const Attempt* before) {
  return before != nullptr && before->has_end_time() && Failed(*before);
}

void AddRecovery(const v1::Job& job, const Attempt& attempt, const Attempt& before,
                 std::vector<Span>* spans) {
  const size_t count = spans->size();
  AddPhase(job, attempt,
           {"recover", true, ToTime(before.end_time()), attempt.has_train_time(),
            ToTime(attempt.train_time())},
           spans);
  if (spans->size() == count) return;
  Span& span = spans->back();
  Set(&span, "ringleader.failure", before.state_reason());
  if (!attempt.has_train_time()) return;
  const uint64_t lost = before.last_step() - std::min(before.last_step(), attempt.first_step());
  Set(&span, "ringleader.steps_lost", lost);
}

Span Root(const v1::Job& job, const Attempt& attempt, const Attempt* before) {
  Span root = Child(job, attempt.number(), kRoot);
  root.set_span_id(root.parent_span_id());
  root.clear_parent_span_id();
  const absl::Time placed = ToTime(attempt.create_time());
  absl::Time begin = attempt.has_queue_time() ? ToTime(attempt.queue_time()) : placed;
  if (Recovers(before)) begin = std::min(begin, ToTime(before->end_time()));
  SetTimes(begin, ToTime(attempt.end_time()), &root);
  Set(&root, "ringleader.job.uid", job.uid());
  Set(&root, "ringleader.owner", job.owner());
  Set(&root, "ringleader.project", job.project());
  Set(&root, "ringleader.outcome", Attempt::State_Name(attempt.state()));
  if (!Failed(attempt)) Set(&root, "ringleader.reason", attempt.state_reason());
  Set(&root, "ringleader.ranks", static_cast<uint64_t>(attempt.ranks_size()));
  Set(&root, "ringleader.nodes", static_cast<uint64_t>(attempt.placements_size()));
  Set(&root, "ringleader.first_step", attempt.first_step());
  Set(&root, "ringleader.last_step", attempt.last_step());
  SetFailure(attempt, &root);
  if (before == nullptr) return root;
  otlp::Link* const link = root.add_links();
  link->set_trace_id(TraceId(job, before->number()));
  link->set_span_id(SpanId(link->trace_id(), kRoot));
  return root;
}

}  // namespace

std::vector<Span> FinishedSpans(const v1::Job& job, const Attempt& attempt, const Attempt* before) {
  const absl::Time placed = ToTime(attempt.place_time());
  const absl::Time created = ToTime(attempt.create_time());
  const absl::Time ready = ToTime(attempt.ready_time());
  const Phase phases[] = {
      {"queue", attempt.has_queue_time(), ToTime(attempt.queue_time()), attempt.has_place_time(),
       placed},
      {"place", attempt.has_place_time(), placed, true, created},
      {"start", true, created, attempt.has_ready_time(), ready},
      {"load", attempt.has_ready_time(), ready, attempt.has_train_time(),
       ToTime(attempt.train_time())},
  };
  std::vector<Span> spans;
  for (const Phase& phase : phases) AddPhase(job, attempt, phase, &spans);
  if (Recovers(before)) AddRecovery(job, attempt, *before, &spans);
  if (attempt.has_end_time()) spans.push_back(Root(job, attempt, before));
  return spans;
}

Span StepSpan(const v1::Job& job, const Attempt& attempt, const v1::StepReport& step) {
  Span span = Child(job, attempt.number(), "step", step.step());
  const absl::Time end = ToTime(step.time());
  SetTimes(end - absl::Seconds(step.step_seconds()), end, &span);
  Set(&span, "ringleader.step", step.step());
  Set(&span, "ringleader.tokens", step.tokens());
  SetSeconds(&span, "ringleader.loss", step.loss());
  SetSeconds(&span, "ringleader.worker_imbalance", step.worker_imbalance());
  SetSeconds(&span, "ringleader.ring_step_imbalance", step.step_imbalance());
  const auto& phases = step.phases();
  for (int i = 0; i < phases.GetDescriptor()->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* const field = phases.GetDescriptor()->field(i);
    const double seconds = phases.GetReflection()->GetDouble(phases, field);
    if (seconds > 0) SetSeconds(&span, absl::StrCat("ringleader.phase.", field->name()), seconds);
  }
  return span;
}

Span CheckpointSpan(const v1::Job& job, const v1::CheckpointNotice& notice) {
  Span span = Child(job, notice.attempt(), "checkpoint", notice.step());
  const absl::Time end = ToTime(notice.time());
  SetTimes(end - absl::Seconds(notice.seconds()), end, &span);
  Set(&span, "ringleader.step", notice.step());
  Set(&span, "ringleader.bytes", notice.bytes());
  Set(&span, "ringleader.path", notice.path());
  return span;
}

}  // namespace ringleader::trace
