// A time limit for calls that may never return: what reads from a mount whose server is gone waits
// in the kernel, and nothing but the server's return ends it.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ringleader {

// So many calls may be under way at once, those that were given up included: of all clients, and of
// one, whose mount may hang for days.
inline constexpr int kMaxLimitedCalls = 256, kMaxLimitedCallsOfOne = 16;

// Runs `call` on a thread of its own and returns its status, or DEADLINE_EXCEEDED once `limit` has
// passed. Then the thread stays behind until the call returns, so `call` must own all that it
// touches. `what` says in errors what was tried: "reading /a/config.json". RESOURCE_EXHAUSTED when
// `client`, or all together, have as many under way as they may. Thread-safe.
absl::Status WithTimeLimit(const std::string& client, absl::Duration limit, const std::string& what,
                           std::function<absl::Status()> call);

}  // namespace ringleader
