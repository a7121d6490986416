// Measures the links between trainers, through the transport of the ring's hops (docs/latency.md).
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "balance/measurements.h"
#include "worker/comm/communicator.h"
#include "worker/trainer/engine/engine_device.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

// Rank 0 exchanges small and large messages with the next rank of its node, and with the first rank
// of the next node, where the job has them and `request` does not know those links. All ranks call
// it; only what rank 0 returns counts. Takes a second or so. An error is one of the transport,
// which training would meet, too.
absl::StatusOr<std::vector<balance::LinkSpeed>> MeasureLinks(const TrainingJob& job,
                                                             const balance::MeasureRequest& request,
                                                             EngineDevice& device,
                                                             comm::Communicator& world);

}  // namespace ringleader::trainer
