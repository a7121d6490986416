// Answers on their way to clients that may not read them.
#pragma once

#include <grpcpp/server_context.h>

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/net/streams/call_patience.h"
#include "coordinator/limits/quota.h"

namespace ringleader::api {

// What one call has sent and its client has not read yet. It counts among what that client leaves
// unread, and ends the call where the client leaves it for too long. One answer at a time; its
// owner sees to it that Begin and End do not meet.
class Delivery {
 public:
  // Of an answer of `bytes`, before it is sent. RESOURCE_EXHAUSTED where the client, or all, leave
  // too much unread: then the answer does not count. `unread` outlives the call, and
  // `context`, which is cancelled after `patience` if that is finite, this delivery.
  absl::Status Begin(limits::Quota* unread, const std::string& client, size_t bytes,
                     const grpc::CallbackServerContext& context, absl::Duration patience);
  // Of one that is sent, and counts, whatever else is left unread.
  void BeginAnyway(limits::Quota* unread, const std::string& client, size_t bytes,
                   const grpc::CallbackServerContext& context, absl::Duration patience);
  // It was read, or the call is over.
  void End();

 private:
  CallPatience patience_;
  limits::Quota::Hold hold_;
};

}  // namespace ringleader::api
