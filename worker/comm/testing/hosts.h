// One test binary as several processes that NCCL takes for hosts of their own: so ranks may share a
// GPU, which NCCL refuses within a host, and speak through the network where they do not share a
// host. tests/gpu/hosts.sh starts the processes; each runs the same tests, and in each test the
// ranks of its host. It sets
//
//   RINGLEADER_TEST_HOSTS       the number of processes; 1 where it is not set
//   RINGLEADER_TEST_HOST        which of them this is
//   RINGLEADER_TEST_RENDEZVOUS  an empty folder that all of them use
//   NCCL_HOSTID                 another one in each
#pragma once

#include <memory>
#include <vector>

#include "worker/comm/testing/run_ranks.h"

namespace ringleader::comm::testing {

struct Hosts {
  int count = 1;
  int number = 0;  // of this process
};

Hosts TestHosts();

// What RunRanks needs for this process's ranks of `ranks`: connected with those of the other
// processes over loopback, an equal number in each and in order; all of them in the first process
// where they cannot be dealt out equally. With one process, LocalCommunicators. Every process makes
// the same calls in the same order. Throws if the others do not come within a minute.
std::vector<std::unique_ptr<Communicator>> HostCommunicators(int ranks);

}  // namespace ringleader::comm::testing
