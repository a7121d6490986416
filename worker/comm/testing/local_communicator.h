// Communicators for the threads of one process: what tests use in place of trainer processes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "worker/comm/communicator.h"

namespace ringleader::comm::testing {

// One communicator per rank, to be used from a thread each. A transfer is a copy from the sender's
// buffer into the receiver's, made when both are there; a send that no rank receives therefore
// never finishes, as it might not on a real network.
std::vector<std::unique_ptr<Communicator>> LocalCommunicators(int ranks);
// The same, which add what a rank sends to another, in bytes, to *sent.
std::vector<std::unique_ptr<Communicator>> CountedCommunicators(int ranks,
                                                                std::atomic<uint64_t>* sent);

}  // namespace ringleader::comm::testing

#include "worker/comm/testing/run_ranks.h"  // IWYU pragma: export
