#pragma once

#include <atomic>

#include "absl/synchronization/notification.h"
#include "coordinator/store/testing/forwarding_store.h"

namespace ringleader::store::testing {

// A store whose readers wait, as on a disk that hangs.
class HangingStore : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Read(absl::FunctionRef<absl::Status(ReadTransaction&)> body) override {
    if (hangs) go_on.WaitForNotification();
    return ForwardingStore::Read(body);
  }
  std::atomic<bool> hangs = false;
  absl::Notification go_on;
};

}  // namespace ringleader::store::testing
