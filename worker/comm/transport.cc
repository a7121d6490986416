#include "worker/comm/transport.h"

#include "absl/time/time.h"

namespace ringleader::comm {
namespace {

// How long a failed transfer waits for the buffer to be let go. Only a frozen peer can hold one up
// for longer, through bytes that the kernel has not taken yet; the process is about to leave then.
constexpr absl::Duration kReleaseTimeout = absl::Milliseconds(1500);

}  // namespace

bool PendingTransfer::Claim() {
  absl::MutexLock lock(&mutex_);
  if (done_) return false;
  ++claims_;
  return true;
}

void PendingTransfer::Release() {
  absl::MutexLock lock(&mutex_);
  --claims_;
  if (claims_ == 0 && finish_when_released_) done_ = true;
}

void PendingTransfer::FinishWhenReleased() {
  absl::MutexLock lock(&mutex_);
  if (done_) return;
  finish_when_released_ = true;
  if (claims_ == 0) done_ = true;
}

void PendingTransfer::Finish(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (done_) return;
  done_ = true;
  status_ = status;
}

absl::Status PendingTransfer::Wait() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&done_));
  mutex_.AwaitWithTimeout(absl::Condition(this, &PendingTransfer::Unclaimed), kReleaseTimeout);
  return status_;
}

}  // namespace ringleader::comm
