#include "base/process/time_limit.h"

#include <map>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/wait/timed_wait.h"

namespace ringleader {
namespace {

class CallsUnderWay {
 public:
  bool TryBegin(const std::string& client) {
    absl::MutexLock lock(&mutex_);
    if (all_ >= kMaxLimitedCalls || of_client_[client] >= kMaxLimitedCallsOfOne) return false;
    ++all_;
    ++of_client_[client];
    return true;
  }
  void End(const std::string& client) {
    absl::MutexLock lock(&mutex_);
    --all_;
    if (--of_client_[client] == 0) of_client_.erase(client);
  }

 private:
  absl::Mutex mutex_;
  int all_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, int> of_client_ ABSL_GUARDED_BY(mutex_);
};

// Outlives the threads that were left behind.
CallsUnderWay& UnderWay() {
  static auto* const calls = new CallsUnderWay;
  return *calls;
}

absl::Status TooMany(const std::string& what) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what,
                   ": too many such calls are under way, some of which may hang; look for a "
                   "mount that does not answer, and try again later"));
}

}  // namespace

absl::Status WithTimeLimit(const std::string& client, absl::Duration limit, const std::string& what,
                           std::function<absl::Status()> call) {
  struct Outcome {
    absl::Mutex mutex;
    absl::Status status ABSL_GUARDED_BY(mutex);
    bool done ABSL_GUARDED_BY(mutex) = false;
  };
  if (!UnderWay().TryBegin(client)) return TooMany(what);
  const auto outcome = std::make_shared<Outcome>();
  try {
    std::thread([outcome, client, call = std::move(call)] {
      absl::Status status = call();
      UnderWay().End(client);
      const absl::MutexLock lock(&outcome->mutex);
      outcome->status = std::move(status);
      outcome->done = true;
    }).detach();
  } catch (const std::system_error&) {  // the system has no thread left
    UnderWay().End(client);
    return TooMany(what);
  }
  {
    const absl::MutexLock lock(&outcome->mutex);
    if (AwaitFor(outcome->mutex, absl::Condition(&outcome->done), limit)) return outcome->status;
  }
  return absl::DeadlineExceededError(absl::StrCat(what, ": no answer within ",
                                                  absl::FormatDuration(limit),
                                                  "; is it on a mount that does not answer?"));
}

}  // namespace ringleader
