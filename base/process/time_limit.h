// A time limit for calls that may never return: what reads from a mount whose server is gone waits
// in the kernel, and nothing but the server's return ends it.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ringleader {

// So many calls may be under way at once, those that were given up included.
inline constexpr int kMaxLimitedCalls = 64;

// Runs `call` on a thread of its own and returns its status, or DEADLINE_EXCEEDED once `limit` has
// passed. Then the thread stays behind until the call returns, so `call` must own all that it
// touches. `what` says in errors what was tried: "reading /a/config.json". RESOURCE_EXHAUSTED when
// kMaxLimitedCalls are under way. Thread-safe.
absl::Status WithTimeLimit(absl::Duration limit, const std::string& what,
                           std::function<absl::Status()> call);

}  // namespace ringleader
