#include "coordinator/api/calls/delivery.h"

#include <grpc/support/time.h>

#include <utility>

namespace ringleader::api {
namespace {

// What gRPC keeps of a call whose answer waits, besides the answer.
constexpr size_t kBytesOfACall = 16384;

}  // namespace

absl::Status Delivery::Begin(limits::Quota* unread, const std::string& client, size_t bytes,
                             const grpc::CallbackServerContext& context, absl::Duration patience) {
  absl::StatusOr<limits::Quota::Hold> hold =
      unread->Take(client, static_cast<int64_t>(kBytesOfACall + bytes));
  if (hold.ok()) hold_ = *std::move(hold);
  if (patience == absl::InfiniteDuration()) return hold.status();
  call_ = std::make_shared<Call>();
  {
    absl::MutexLock lock(&call_->mutex);
    call_->context = &context;
  }
  // By a clock that nobody sets.
  const gpr_timespec deadline =
      gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                   gpr_time_from_millis(absl::ToInt64Milliseconds(patience), GPR_TIMESPAN));
  alarm_.emplace().Set(deadline, [call = call_](bool is_due) {
    absl::MutexLock lock(&call->mutex);
    if (is_due && call->context != nullptr) call->context->TryCancel();
  });
  return hold.status();
}

void Delivery::End() {
  if (call_ != nullptr) {
    absl::MutexLock lock(&call_->mutex);
    call_->context = nullptr;
  }
  alarm_.reset();  // cancels it
  call_.reset();
  hold_ = {};
}

}  // namespace ringleader::api
