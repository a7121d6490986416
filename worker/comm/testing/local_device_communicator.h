// Device communicators for the threads of one process that share one GPU: what tests use in place
// of NCCL between trainers.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "worker/comm/device_communicator.h"

namespace ringleader::comm::testing {

// One per rank, to be used from a thread each. A call waits on the host until all ranks have made
// it; on the device it is copies and sums on a stream of its own, ordered by events alone.
std::vector<std::unique_ptr<DeviceCommunicator>> LocalDeviceCommunicators(int ranks);

// Runs `body` on a thread for every rank. A rank whose body throws aborts the others; the first
// exception is rethrown.
void RunDeviceRanks(int ranks, const std::function<void(DeviceCommunicator&)>& body);

}  // namespace ringleader::comm::testing
