#include "worker/comm/testing/grpc_communicators.h"

#include <string>
#include <thread>

#include "worker/comm/grpc/grpc_communicator.h"

namespace ringleader::comm::testing {

std::vector<std::unique_ptr<Communicator>> GrpcCommunicators(int ranks) {
  std::vector<std::unique_ptr<GrpcListener>> listeners;
  std::vector<std::string> addresses;
  for (int rank = 0; rank < ranks; ++rank) {
    listeners.push_back(
        GrpcListener::Listen({.rank = rank, .size = ranks, .fencing_token = 7}).value());
    addresses.push_back(listeners.back()->address());
  }
  std::vector<std::unique_ptr<Communicator>> communicators(ranks);
  std::vector<std::thread> threads;
  threads.reserve(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back(
        [&, rank] { communicators[rank] = listeners[rank]->Connect(addresses).value(); });
  }
  for (std::thread& thread : threads) thread.join();
  return communicators;
}

}  // namespace ringleader::comm::testing
