// One trainer process as its worker sees it, and what its end means.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "ringleader/v1/trainer_link.pb.h"
#include "ringleader/v1/worker_control.pb.h"
#include "worker/agent/process/child_process.h"
#include "worker/agent/trainers/trainer_link_service.h"

namespace ringleader::agent {

struct Trainer {
  uint32_t rank = 0;
  uint32_t slot = 0;  // which of the node's places, and GPUs, it has
  std::optional<Process> process = {};
  std::string secret = {};  // that the process was given, as another user's; else empty
  int open_pipes = 0;       // of its output, still being read
  std::shared_ptr<TrainerConnection> connection = {};

  // Its last signs of life; times are monotonic.
  absl::Time last_pulse = absl::InfiniteFuture();
  absl::Time last_progress = absl::InfiniteFuture();
  // When the lease ends that it was told last, in boot time: its process does not outlive that.
  absl::Time lease_end = absl::InfiniteFuture();
  uint64_t step = 0;
  std::string phase = {};
  uint64_t progress = 0;  // within the phase, as its pulses count it
  std::string last_error_line = {};
  absl::Time last_error_time = absl::InfinitePast();  // by the wall clock

  // Its end.
  std::optional<v1::TrainerResult> result = {};
  std::string killed_because = {};  // by its worker; empty: not killed
  bool told_to_abort = false;
  std::optional<ExitStatus> exit = {};
  absl::Time exited_at = {};
  bool reported = false;
};

// What to tell the coordinator of a trainer whose process is gone, at `now` by the wall clock.
v1::TrainerExited DescribeExit(const Trainer& trainer, absl::Time now);

}  // namespace ringleader::agent
