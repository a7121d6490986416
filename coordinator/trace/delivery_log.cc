#include "coordinator/trace/delivery_log.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/checksum.h"
#include "base/files.h"
#include "base/status_macros.h"

namespace ringleader::trace {
namespace {

constexpr char kMagic[] = "ringleader-traces 1 ";
constexpr size_t kIdHexDigits = 16;

uint64_t Nanoseconds(absl::Time time) {
  return static_cast<uint64_t>(std::max<int64_t>(absl::ToUnixNanos(time), 0));
}

std::string ChecksumText(const std::string& lines) {
  return absl::StrCat(absl::Hex(Checksum(lines.data(), lines.size()), absl::kZeroPad16));
}

}  // namespace

absl::StatusOr<DeliveryLog> DeliveryLog::Open(const std::string& path, absl::Time now) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  if (absl::IsNotFound(text.status())) return DeliveryLog(path, now);
  RETURN_IF_ERROR(text.status());
  const size_t end = text->find('\n');
  const std::string lines = end == std::string::npos ? "" : text->substr(end + 1);
  if (text->substr(0, end) != kMagic + ChecksumText(lines)) {
    return absl::DataLossError(path + ": the checksum does not fit");
  }
  const std::vector<std::string> parts = absl::StrSplit(lines, '\n', absl::SkipEmpty());
  uint64_t nanoseconds = 0;
  if (parts.empty() || !absl::SimpleAtoi(parts[0], &nanoseconds)) {
    return absl::DataLossError(path + ": the first line is no time");
  }
  DeliveryLog log(path, absl::FromUnixNanos(static_cast<int64_t>(nanoseconds)));
  for (auto part = std::next(parts.begin()); part != parts.end(); ++part) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(*part, absl::MaxSplits(' ', 1));
    if (pair.first.size() != kIdHexDigits || !absl::SimpleAtoi(pair.second, &nanoseconds)) {
      return absl::DataLossError(absl::StrCat(path, ": '", *part, "' is no span"));
    }
    log.done_[absl::HexStringToBytes(pair.first)] = nanoseconds;
  }
  return log;
}

bool DeliveryLog::IsDone(const otlp::Span& span) const {
  return span.end_time_unix_nano() <= Nanoseconds(mark_) || done_.contains(span.span_id());
}

void DeliveryLog::Handed(std::vector<SpanEnd> spans, size_t taken, absl::Time complete_until) {
  for (size_t i = 0; i < spans.size(); ++i) {
    if (i < taken) {
      waiting_.push_back({std::move(spans[i]), complete_until});
    } else {
      done_[spans[i].id] = spans[i].nanoseconds;
      is_saved_ = false;
    }
  }
}

absl::Status DeliveryLog::Settle(uint64_t settled, absl::Time complete_until) {
  for (; settled_ < settled && !waiting_.empty(); ++settled_) {
    done_[waiting_.front().span.id] = waiting_.front().span.nanoseconds;
    waiting_.pop_front();
    is_saved_ = false;
  }
  if (is_saved_) return absl::OkStatus();
  const absl::Time complete = waiting_.empty() ? complete_until : waiting_.front().complete_until;
  mark_ = std::max(mark_, complete - kLate);
  std::erase_if(done_, [&](const auto& one) { return one.second <= Nanoseconds(mark_); });
  RETURN_IF_ERROR(Save());
  is_saved_ = true;
  return absl::OkStatus();
}

absl::Status DeliveryLog::Save() const {
  std::string lines = absl::StrCat(Nanoseconds(mark_), "\n");
  for (const auto& [id, end] : done_) {
    absl::StrAppend(&lines, absl::BytesToHexString(id), " ", end, "\n");
  }
  return WriteFileAtomically(path_, absl::StrCat(kMagic, ChecksumText(lines), "\n", lines));
}

}  // namespace ringleader::trace
