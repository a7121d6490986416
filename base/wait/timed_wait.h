// Waits that end in time whatever the machine's clock is set to meanwhile. abseil's own sleep until
// a time of the wall clock: set back by an hour, it lets them sleep for an hour more.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ringleader {

// Waits until `condition` holds, or for as long as `patience` by the steady clock; returns whether
// it holds. As with Mutex::Await, the caller holds `mutex`, which is free while it waits.
bool AwaitFor(absl::Mutex& mutex, const absl::Condition& condition, absl::Duration patience)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

}  // namespace ringleader
