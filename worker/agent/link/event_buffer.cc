#include "worker/agent/link/event_buffer.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/net/message_size.h"
#include "base/wait/timed_wait.h"

namespace ringleader::agent {

void EventBuffer::PushLocked(v1::WorkerMessage message, size_t log_bytes, size_t layer_bytes) {
  message.set_sequence(acknowledged_ + entries_.size() + 1);
  log_bytes_ += log_bytes;
  layer_bytes_ += layer_bytes;
  entries_.push_back({std::move(message), log_bytes, layer_bytes});
}

void EventBuffer::Push(v1::WorkerMessage message) {
  absl::MutexLock lock(&mutex_);
  if (Skips(message)) {
    ++dropped_step_reports_;
    return;
  }
  size_t layer_bytes = 0;
  if (message.event().has_step()) {
    v1::StepReport* const step = message.mutable_event()->mutable_step();
    for (const v1::LayerReport& layer : step->layers()) layer_bytes += layer.ByteSizeLong();
    if (layer_bytes > kMaxLayerBytes || layer_bytes_ + layer_bytes > max_layer_bytes_) {
      step->clear_layers();
      layer_bytes = 0;
    }
  }
  PushLocked(std::move(message), 0, layer_bytes);
  if (++unsent_ > max_unsent_) ThinSteps();
}

void EventBuffer::HandOut(uint64_t sequence) {
  for (; handed_out_ < sequence; ++handed_out_) {
    if (!entries_[handed_out_ - acknowledged_].message.event().has_logs()) --unsent_;
  }
  if (handed_out_ == acknowledged_ + entries_.size()) step_stride_ = 1;
}

bool EventBuffer::Skips(const v1::WorkerMessage& message) const {
  return message.event().has_step() && message.event().step().step() % step_stride_ != 0;
}

// The same steps go on every worker of a job, sooner or later, so that what is left can be merged.
void EventBuffer::ThinSteps() {
  const auto unsent = entries_.begin() + static_cast<long>(handed_out_ - acknowledged_);
  const bool any = std::any_of(unsent, entries_.end(),
                               [](const Entry& entry) { return entry.message.event().has_step(); });
  if (!any) return;
  step_stride_ *= 2;
  const auto end = std::remove_if(unsent, entries_.end(), [this](const Entry& entry) {
    mutex_.AssertHeld();
    if (!Skips(entry.message)) return false;
    layer_bytes_ -= entry.layer_bytes;
    --unsent_;
    ++dropped_step_reports_;
    return true;
  });
  entries_.erase(end, entries_.end());
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].message.set_sequence(acknowledged_ + i + 1);
  }
}

void EventBuffer::PushLogs(v1::AttemptEvent event, std::vector<v1::LogLine> lines) {
  absl::MutexLock lock(&mutex_);
  v1::LogBatch* const batch = event.mutable_logs();
  size_t bytes = 0;
  for (v1::LogLine& line : lines) {
    const Source source = {event.fencing_token(), line.rank()};
    if (log_bytes_ + bytes >= max_log_bytes_) {
      ++gaps_[source];
      ++dropped_log_lines_;
      continue;
    }
    if (const auto gap = gaps_.find(source); gap != gaps_.end()) {
      v1::LogLine* const marker = batch->add_lines();
      marker->set_rank(line.rank());
      *marker->mutable_time() = line.time();
      marker->set_is_stderr(true);
      marker->set_text(absl::StrFormat(
          "[%d lines were dropped here: the coordinator was away, or too slow]", gap->second));
      gaps_.erase(gap);
    }
    bytes += line.ByteSizeLong();
    *batch->add_lines() = std::move(line);
  }
  if (batch->lines().empty()) return;
  v1::WorkerMessage message;
  *message.mutable_event() = std::move(event);
  PushLocked(std::move(message), bytes, 0);
}

void EventBuffer::Acknowledge(uint64_t sequence) {
  absl::MutexLock lock(&mutex_);
  HandOut(std::min(sequence, acknowledged_ + entries_.size()));
  while (!entries_.empty() && acknowledged_ < sequence) {
    log_bytes_ -= entries_.front().log_bytes;
    layer_bytes_ -= entries_.front().layer_bytes;
    entries_.pop_front();
    ++acknowledged_;
  }
}

std::optional<v1::WorkerMessage> EventBuffer::Next(uint64_t sequence, absl::Duration patience) {
  absl::MutexLock lock(&mutex_);
  const auto ready = [this, sequence]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return woken_ || acknowledged_ + entries_.size() > sequence;
  };
  AwaitFor(mutex_, absl::Condition(&ready), patience);
  woken_ = false;
  const uint64_t after = std::max(sequence, acknowledged_);
  if (acknowledged_ + entries_.size() <= after) return std::nullopt;
  HandOut(after + 1);
  return entries_[after - acknowledged_].message;
}

void EventBuffer::Wake() {
  absl::MutexLock lock(&mutex_);
  woken_ = true;
}

bool EventBuffer::empty() const {
  return size() == 0;
}

size_t EventBuffer::size() const {
  absl::MutexLock lock(&mutex_);
  return entries_.size();
}

uint64_t EventBuffer::dropped_log_lines() const {
  absl::MutexLock lock(&mutex_);
  return dropped_log_lines_;
}

uint64_t EventBuffer::dropped_step_reports() const {
  absl::MutexLock lock(&mutex_);
  return dropped_step_reports_;
}

uint64_t EventBuffer::acknowledged() const {
  absl::MutexLock lock(&mutex_);
  return acknowledged_;
}

}  // namespace ringleader::agent
