// gRPC communicators between the threads of one process.
#pragma once

#include <memory>
#include <vector>

#include "worker/comm/communicator.h"

namespace ringleader::comm::testing {

// One per rank, connected over loopback. To be destroyed by a thread each, as processes would:
// every rank waits for the others to take leave.
std::vector<std::unique_ptr<Communicator>> GrpcCommunicators(int ranks);

}  // namespace ringleader::comm::testing
