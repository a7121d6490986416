#include "worker/comm/testing/grpc_communicators.h"

#include <thread>

#include "absl/status/statusor.h"

namespace ringleader::comm::testing {

std::vector<std::unique_ptr<Communicator>> ConnectAll(
    const std::vector<std::unique_ptr<GrpcListener>>& listeners,
    const std::vector<std::string>& addresses) {
  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> connected(listeners.size());
  {
    std::vector<std::jthread> threads;
    threads.reserve(listeners.size());
    for (size_t i = 0; i < listeners.size(); ++i) {
      threads.emplace_back([&, i] { connected[i] = listeners[i]->Connect(addresses); });
    }
  }
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& communicator : connected) {
    if (!communicator.ok()) {
      // Those that are connected would wait for this one to take leave.
      for (const auto& listener : listeners) listener->Abort("another rank did not connect");
    }
    communicators.push_back(std::move(communicator).value());
  }
  return communicators;
}

std::vector<std::unique_ptr<Communicator>> GrpcCommunicators(int ranks) {
  std::vector<std::unique_ptr<GrpcListener>> listeners;
  std::vector<std::string> addresses;
  for (int rank = 0; rank < ranks; ++rank) {
    listeners.push_back(
        GrpcListener::Listen({.rank = rank, .size = ranks, .fencing_token = 7}).value());
    addresses.push_back(listeners.back()->address());
  }
  return ConnectAll(listeners, addresses);
}

}  // namespace ringleader::comm::testing
