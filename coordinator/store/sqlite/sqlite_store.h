// The Store in one SQLite file (WAL, synchronous=FULL).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "coordinator/store/store.h"

namespace ringleader::store {

struct SqliteOptions {
  std::string path = {};
  // Bound on one job's log; the oldest lines go first.
  int64_t log_bytes_per_job = int64_t{64} << 20;
  // Bound on the step reports of one job: the newest half of it is kept in full; of what is older,
  // the first step and every 2^n-th after it, with the smallest n that keeps to the other half.
  int64_t steps_per_job = 20'000;
  // Bound on the evaluations of one job: the newest half of it is kept; of what is older, the first
  // in each of at most three eighths as many equal stretches of steps.
  int64_t evals_per_job = 4096;
  // Space that is kept for what must be written while the disk is full; 0: none.
  int64_t reserve_bytes = 0;
  Clock* clock = Clock::Real();
  // Called after each group commit with its duration and the number of writes in it; may be empty.
  std::function<void(absl::Duration, int)> on_commit = {};
  // Called once, from a thread of the store's, if the file turns out to be damaged (DATA_LOSS): all
  // of it is read for that, beside service. If empty, it is not.
  std::function<void(const absl::Status&)> on_damage = {};
};

// Creates the file if there is none, and makes it private to its user. One process at a time:
// FAILED_PRECONDITION when another holds it; further errors as in Migrate() and
// Connection::Explain().
absl::StatusOr<std::unique_ptr<Store>> OpenSqliteStore(SqliteOptions options);

}  // namespace ringleader::store
