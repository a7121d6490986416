// Which spans a collector has been given, kept in a file: a coordinator that takes over from one
// that was killed sends what that one had not sent, and no more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "opentelemetry/trace_service.pb.h"

namespace ringleader::trace {

namespace otlp = ::opentelemetry::proto::collector::trace::v1;

struct SpanEnd {
  std::string id;
  uint64_t nanoseconds = 0;
};

// A span is done with once the collector took or refused it, or it was dropped and counted. All
// that ended at mark() or before are; of later ones the log knows the ids. docs/formats.md
// describes the file. Not thread-safe.
class DeliveryLog {
 public:
  // What was recorded so long after it was over, and was not sent when a coordinator was killed, is
  // lost.
  static constexpr absl::Duration kLate = absl::Minutes(1);

  // Where there is no file, all that ended at `now` or before is done with. DATA_LOSS says what is
  // wrong with a file that is damaged.
  static absl::StatusOr<DeliveryLog> Open(const std::string& path, absl::Time now);

  // A log of nothing but the mark, which replaces the file with the first call of Settle().
  DeliveryLog(std::string path, absl::Time mark) : path_(std::move(path)), mark_(mark) {}

  absl::Time mark() const { return mark_; }
  bool IsDone(const otlp::Span& span) const;

  // The exporter took the first `taken` of `spans`, which it settles in order, and dropped the
  // rest. Everything that was recorded before `complete_until` had been handed over before.
  void Handed(std::vector<SpanEnd> spans, size_t taken, absl::Time complete_until);
  // Whether the exporter has spans that it has not settled.
  bool waits() const { return !waiting_.empty(); }
  // The exporter has settled so many spans since this log was opened, and all that was recorded
  // before `complete_until` has been handed to it. Writes the file if that is news.
  absl::Status Settle(uint64_t settled, absl::Time complete_until);

 private:
  struct Waiting {
    SpanEnd span;
    absl::Time complete_until;
  };

  absl::Status Save() const;

  std::string path_;
  absl::Time mark_;
  std::map<std::string, uint64_t> done_ = {};  // [id of a span] → its end, after the mark
  std::deque<Waiting> waiting_ = {};
  uint64_t settled_ = 0;
  bool is_saved_ = true;
};

}  // namespace ringleader::trace
