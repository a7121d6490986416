// gRPC communicators between the threads of one process.
#pragma once

#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "worker/comm/communicator.h"

namespace ringleader::comm::testing {

// How long it may take from an abort, or a rank's death, until every waiter is released.
#ifdef RINGLEADER_SANITIZED
inline constexpr absl::Duration kReleaseLimit = absl::Seconds(10);
#else
inline constexpr absl::Duration kReleaseLimit = absl::Seconds(2);
#endif

// One per rank, connected over loopback. To be destroyed by a thread each, as processes would:
// every rank waits for the others to take leave.
std::vector<std::unique_ptr<Communicator>> GrpcCommunicators(int ranks);

}  // namespace ringleader::comm::testing
