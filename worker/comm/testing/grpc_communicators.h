// gRPC communicators between the threads of one process.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/grpc/grpc_communicator.h"

namespace ringleader::comm::testing {

// How long it may take from an abort, or a rank's death, until every waiter is released: on a busy
// machine, and less than a keepalive takes to find it out.
inline constexpr absl::Duration kReleaseLimit = absl::Seconds(10);

// Connects each of the listeners, which are ranks of this process, on a thread of its own.
// `addresses`: of all ranks. Throws what kept one from connecting, once no thread is left.
std::vector<std::unique_ptr<Communicator>> ConnectAll(
    const std::vector<std::unique_ptr<GrpcListener>>& listeners,
    const std::vector<std::string>& addresses);

// One per rank, connected over loopback. To be destroyed by a thread each, as processes would:
// every rank waits for the others to take leave.
std::vector<std::unique_ptr<Communicator>> GrpcCommunicators(int ranks);

}  // namespace ringleader::comm::testing
