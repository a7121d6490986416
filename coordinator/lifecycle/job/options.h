// The control plane's time-outs, with the reason for each default.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace CLI {
class App;
}

namespace ringleader::lifecycle {

struct Options {
  // Five heartbeats may be lost before a node counts as out of sight.
  absl::Duration heartbeat_interval = absl::Seconds(2);
  absl::Duration lease = absl::Seconds(10);
  // Out of sight for so long, a node's trainers are given up and replaced. The worker kills them
  // itself after `fence_after`, which leaves it the difference to do so.
  absl::Duration adoption_timeout = absl::Seconds(120);
  absl::Duration fence_after = absl::Seconds(90);
  // Every rank has to listen so soon after its placement: loading a large model takes minutes.
  absl::Duration start_timeout = absl::Minutes(10);
  // After the first sign of failure, so long is waited for the rank whose own fault it was: ranks
  // that lost their peer often report before the worker that saw the peer die.
  absl::Duration blame_window = absl::Seconds(3);
  // Before the n-th retry in a row: retry_backoff * 2^(n-1), at most max_retry_backoff.
  absl::Duration retry_backoff = absl::Seconds(2);
  absl::Duration max_retry_backoff = absl::Minutes(5);
  // A node that refused to start an attempt gets no other of that job for so long; twice as long
  // after each further refusal, at most max_retry_backoff.
  absl::Duration refusal_pause = absl::Seconds(30);
  // A node on which attempts of so many jobs failed one after the other within the window, and none
  // completed a step, is set aside for a while, unless it is the last one that takes trainers.
  uint32_t set_aside_after_jobs = 3;
  absl::Duration set_aside_window = absl::Minutes(15);
  absl::Duration set_aside_for = absl::Minutes(30);
  // A node without trainers is forgotten when it was not heard of for so long, and one whose worker
  // left in good order as soon as its lease has run out.
  absl::Duration keep_nodes = absl::Hours(24 * 7);
  // Trainers that are asked to leave have so long until SIGKILL: with a checkpoint, and without.
  absl::Duration checkpoint_grace = absl::Seconds(120);
  absl::Duration abort_grace = absl::Seconds(5);
  // Events that arrive within it share one transaction.
  absl::Duration batch_window = absl::Milliseconds(25);
};

// --lease, --adoption-timeout and so on, in seconds. `options` must outlive the parse.
void AddLifecycleFlags(CLI::App& app, Options* options);

// INVALID_ARGUMENT names the flags that contradict each other.
absl::Status Validate(const Options& options);

}  // namespace ringleader::lifecycle
