#include "worker/comm/transport.h"

#include "base/wait/timed_wait.h"

namespace ringleader::comm {

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

absl::Status PendingTransfer::Wait(absl::Duration patience) {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&done_));
  AwaitFor(mutex_, absl::Condition(this, &PendingTransfer::Unclaimed), patience);
  return status_;
}

}  // namespace ringleader::comm
