// What the worker has to tell the coordinator and has not been acknowledged: in order, numbered
// without gaps, kept over reconnects.
//
// Results, evaluations, checkpoints and acknowledgements are never dropped. Logs are bounded: lines
// that do not fit are counted, and a line that says how many were lost stands in their place. The
// layers of step reports, which are nearly all of their size, are bounded, too: reports that do not
// fit go without them. What is left is small; while the coordinator's disk is full, which may last
// for days, it is kept of every second, fourth, eighth step and so on.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ringleader/v1/worker_control.pb.h"

namespace ringleader::agent {

// Thread-safe.
class EventBuffer {
 public:
  // `max_unsent`: messages beyond it that were never sent, logs apart, make step reports go.
  explicit EventBuffer(size_t max_log_bytes, size_t max_layer_bytes = size_t{64} << 20,
                       size_t max_unsent = 100'000)
      : max_log_bytes_(max_log_bytes), max_layer_bytes_(max_layer_bytes), max_unsent_(max_unsent) {}

  // Takes the message, with the next sequence.
  void Push(v1::WorkerMessage message);
  // `event`: job, attempt and token; its logs are set here.
  void PushLogs(v1::AttemptEvent event, std::vector<v1::LogLine> lines);

  // Drops everything up to `sequence`.
  void Acknowledge(uint64_t sequence);
  // The first message after `sequence`, waiting for one as long as `patience` or until Wake().
  std::optional<v1::WorkerMessage> Next(uint64_t sequence, absl::Duration patience);
  // Ends the current wait.
  void Wake();

  bool empty() const;
  size_t size() const;
  uint64_t dropped_log_lines() const;
  uint64_t dropped_step_reports() const;
  // The highest sequence that was acknowledged.
  uint64_t acknowledged() const;

 private:
  struct Entry {
    v1::WorkerMessage message;
    size_t log_bytes = 0;
    size_t layer_bytes = 0;
  };
  // One rank of one attempt, whose lost lines are counted since the last that was kept.
  using Source = std::pair<uint64_t, int32_t>;  // token, rank

  void PushLocked(v1::WorkerMessage message, size_t log_bytes, size_t layer_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Everything up to `sequence` may have been sent from now on.
  void HandOut(uint64_t sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Skips(const v1::WorkerMessage& message) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops unsent reports of every second step that is left, and numbers the rest anew.
  void ThinSteps() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t max_log_bytes_;
  const size_t max_layer_bytes_;
  const size_t max_unsent_;
  mutable absl::Mutex mutex_;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);  // sequences acknowledged_+1, +2, …
  uint64_t acknowledged_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t log_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t layer_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<Source, uint64_t> gaps_ ABSL_GUARDED_BY(mutex_);
  uint64_t dropped_log_lines_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t handed_out_ ABSL_GUARDED_BY(mutex_) = 0;  // the highest sequence; may have been sent
  size_t unsent_ ABSL_GUARDED_BY(mutex_) = 0;        // messages after it that are no logs
  // Only steps that are multiples of it are reported. More than 1 until all has been handed out.
  uint64_t step_stride_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t dropped_step_reports_ ABSL_GUARDED_BY(mutex_) = 0;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringleader::agent
