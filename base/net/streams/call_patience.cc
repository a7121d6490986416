#include "base/net/streams/call_patience.h"

#include <grpc/support/time.h>

namespace ringleader {

void CallPatience::Begin(const grpc::CallbackServerContext& context, absl::Duration patience) {
  call_ = std::make_shared<Call>(&context);
  const gpr_timespec deadline =
      gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                   gpr_time_from_millis(absl::ToInt64Milliseconds(patience), GPR_TIMESPAN));
  alarm_.emplace().Set(deadline, [call = call_](bool is_due) {
    absl::MutexLock lock(&call->mutex);
    if (is_due && call->context != nullptr) call->context->TryCancel();
  });
}

void CallPatience::End() {
  if (call_ != nullptr) {
    absl::MutexLock lock(&call_->mutex);
    call_->context = nullptr;
  }
  alarm_.reset();  // cancels it
  call_.reset();
}

}  // namespace ringleader
