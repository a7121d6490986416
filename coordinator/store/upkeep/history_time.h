// The time by which history is too old.
#pragma once

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "coordinator/store/store.h"

namespace ringleader::store {

// Follows the time of day, but leaps nowhere: it moves by at most twice what has passed by a clock
// that nobody can set, and the store keeps how far it came. A time of day that is wrong for a day,
// by however much, costs history of a day. A coordinator that was away for a day is behind for the
// day after.
//
// It begins with the newest record that the store had when the process started.
class HistoryTime {
 public:
  // All must outlive it.
  HistoryTime(Store* store, const Clock* time_of_day, const Clock* steady);

  // To be called before this process records anything: where the store keeps none yet, the time
  // begins. Errors are those of the store.
  absl::Status Begin();
  // The time by now, which is no later than the time of day. Infinitely past as long as there is no
  // history. Errors are those of the store; what passed until then counts in the next call.
  absl::StatusOr<absl::Time> Advance();

 private:
  Store& store_;
  const Clock& time_of_day_;
  const Clock& steady_;
  absl::Time advanced_;  // when Advance() succeeded last, by steady_
};

}  // namespace ringleader::store
