// What clients may ask of the coordinator, with the reason for each default, and the books that are
// kept of it.
#pragma once

#include <cstdint>

#include "base/clock.h"
#include "coordinator/limits/quota.h"

namespace CLI {
class App;
}

namespace ringleader::limits {

// One client gets a tenth at most of what all together get.
struct Options {
  // Unary calls under way, waiting ones included: those that wait cost a few kilobytes.
  int64_t calls_per_client = 100;
  int64_t calls = 1000;
  // Calls under way that may take seconds each: CreateJob and ValidateJob, which check files and
  // plan; histories, and lists by label, which look at much of the store.
  int64_t checks_per_client = 32;
  int64_t checks = 320;
  // Health/Check and Health/Watch, which need no certificate. gRPC serves them itself; one whose
  // answer is not read costs some 16 KiB.
  int64_t health_calls_per_client = 100;
  int64_t health_calls = 1000;
  // MiB of answers that are not read yet, and as many of messages of streams: each has 4 MiB at
  // most.
  int64_t unread_mebibytes_per_client = 64;
  int64_t unread_mebibytes = 640;
  // WatchJob and TailLogs: no thread each, but all that follow a job read it at each change.
  int64_t watches_per_client = 1000;
  int64_t watches = 10'000;
  // MiB of job files that CreateJob and ValidateJob bring. A job is kept for months; at most so
  // much comes in at once, and a sixteenth of that a second.
  int64_t submitted_mebibytes_per_client = 16;
  int64_t submitted_mebibytes = 160;
  // Sessions of workers that have not said hello. A restarted coordinator has all workers of a
  // site behind one address at its door, but each says hello at once.
  int64_t silent_sessions_per_client = 200;
  int64_t silent_sessions = 2000;
};

// --calls, --calls-per-client and so on. `options` must outlive the parse.
void AddLimitFlags(CLI::App& app, Options* options);

// The books. Thread-safe; outlive the server.
struct Limits {
  // `clock` must outlive them.
  Limits(const Options& options, const Clock* clock, prometheus::Registry* registry);

  LimitMetrics metrics;
  Quota calls;
  Quota checks;
  Quota health_calls;
  Quota unread_answers;   // bytes
  Quota unread_messages;  // of streams, bytes
  Quota watches;
  Quota silent_sessions;
  ByteRate submitted;
};

}  // namespace ringleader::limits
