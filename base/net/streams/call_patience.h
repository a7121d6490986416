// A call ends when its peer does not read what it was sent, or asks no more, for too long.
#pragma once

#include <grpcpp/alarm.h>
#include <grpcpp/server_context.h>

#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ringleader {

// Its owner sees to it that Begin and End do not meet.
class CallPatience {
 public:
  CallPatience() = default;
  ~CallPatience() { End(); }
  CallPatience(const CallPatience&) = delete;
  CallPatience& operator=(const CallPatience&) = delete;

  // `context` is cancelled after so long, by a clock that nobody sets, unless End() comes before;
  // it must be alive until then.
  void Begin(const grpc::CallbackServerContext& context, absl::Duration patience);
  void End();

 private:
  // What the alarm may still look at when the call is over.
  struct Call {
    explicit Call(const grpc::CallbackServerContext* of) : context(of) {}
    absl::Mutex mutex;
    const grpc::CallbackServerContext* context ABSL_GUARDED_BY(mutex);
  };

  std::shared_ptr<Call> call_;
  std::optional<grpc::Alarm> alarm_;
};

}  // namespace ringleader
