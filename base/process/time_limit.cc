#include "base/process/time_limit.h"

#include <atomic>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace ringleader {
namespace {

std::atomic<int> under_way = 0;

absl::Status TooMany(const std::string& what) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what,
                   ": too many such calls are under way, some of which may hang; look for a "
                   "mount that does not answer, and try again later"));
}

}  // namespace

absl::Status WithTimeLimit(absl::Duration limit, const std::string& what,
                           std::function<absl::Status()> call) {
  struct Outcome {
    absl::Status status;
    absl::Notification done;
  };
  if (under_way.fetch_add(1) >= kMaxLimitedCalls) {
    --under_way;
    return TooMany(what);
  }
  const auto outcome = std::make_shared<Outcome>();
  try {
    std::thread([outcome, call = std::move(call)] {
      outcome->status = call();
      --under_way;
      outcome->done.Notify();
    }).detach();
  } catch (const std::system_error&) {  // the system has no thread left
    --under_way;
    return TooMany(what);
  }
  if (outcome->done.WaitForNotificationWithTimeout(limit)) return outcome->status;
  return absl::DeadlineExceededError(absl::StrCat(what, ": no answer within ",
                                                  absl::FormatDuration(limit),
                                                  "; is it on a mount that does not answer?"));
}

}  // namespace ringleader
