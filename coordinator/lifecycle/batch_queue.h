// What waits to be applied by the controller's thread, in the order in which it came: requests of
// users, events of workers, and what keeps training alive.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "coordinator/session/session.h"
#include "coordinator/store/store.h"

namespace ringleader::lifecycle {

class ControllerCore;

// One thing to apply in the next batch.
struct BatchItem {
  // Fails only when the transaction cannot go on; what a request may not do is its own reply.
  std::function<absl::Status(ControllerCore&, store::WriteTransaction&, absl::Time)> apply;
  // Learns what became of the batch. Somebody waits for it.
  std::function<void(const absl::Status&)> done = {};
  // Has to be applied while the disk is full, too.
  bool vital = false;
  // What a worker's session brought.
  std::shared_ptr<session::Session> session = {};
  // Size of a message that was delivered, for which the session waits to hear Taken(); 0: none.
  size_t message_bytes = 0;
  // A change that may take long: others come in a batch of their own.
  bool ends_batch = false;
};

// Thread-safe.
class BatchQueue {
 public:
  // After Stop() the item's `done` hears UNAVAILABLE.
  void Push(BatchItem item) ABSL_LOCKS_EXCLUDED(mutex_);

  // Waits for something to take, at most for `tick`; then, unless somebody waits for what there is,
  // for more that comes within `window` and shares its sync to disk. False after Stop().
  bool Await(absl::Duration tick, absl::Duration window) ABSL_LOCKS_EXCLUDED(mutex_);

  // While there is space: the oldest items, as many as go well into one transaction. Otherwise only
  // what is vital; requests are refused with `space`, and events wait where they are.
  std::vector<BatchItem> Take(const absl::Status& space) ABSL_LOCKS_EXCLUDED(mutex_);

  // Whether Take() may return more, as it does at once after a full batch.
  bool IsReady() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Tells those who wait what became of a batch that Take() returned, and sessions that there is
  // room again.
  static void Finish(const std::vector<BatchItem>& batch, const absl::Status& outcome);

  // Returns whether it was the first to stop.
  bool Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  std::vector<BatchItem> TakeOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Leaves events where they are. Requests, for which somebody waits, go to `refused`; events of a
  // session to `superseded` if another one of its node says hello in this batch.
  std::vector<BatchItem> TakeVital(std::vector<BatchItem>* refused,
                                   std::vector<BatchItem>* superseded)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  std::deque<BatchItem> items_ ABSL_GUARDED_BY(mutex_);
  bool ready_ ABSL_GUARDED_BY(mutex_) = false;   // there may be something to take
  bool urgent_ ABSL_GUARDED_BY(mutex_) = false;  // somebody waits for it
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringleader::lifecycle
