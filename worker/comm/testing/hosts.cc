#include "worker/comm/testing/hosts.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "worker/comm/grpc/grpc_communicator.h"

namespace ringleader::comm::testing {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

std::string Required(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr) throw std::runtime_error(absl::StrCat(name, " is not set"));
  return value;
}

// Whole or not at all, for those who wait for it.
void Publish(const std::string& path, const std::string& address) {
  std::ofstream(path + ".new") << address;
  std::filesystem::rename(path + ".new", path);
}

std::string Await(const std::string& path) {
  const absl::Time deadline = absl::Now() + kPatience;
  while (!std::filesystem::exists(path)) {
    if (absl::Now() > deadline) throw std::runtime_error("no other process wrote " + path);
    absl::SleepFor(absl::Milliseconds(5));
  }
  std::string address;
  std::ifstream(path) >> address;
  return address;
}

}  // namespace

Hosts TestHosts() {
  const char* const count = std::getenv("RINGLEADER_TEST_HOSTS");
  if (count == nullptr) return {};
  return {.count = std::atoi(count), .number = std::stoi(Required("RINGLEADER_TEST_HOST"))};
}

std::vector<std::unique_ptr<Communicator>> HostCommunicators(int ranks) {
  const Hosts hosts = TestHosts();
  if (hosts.count == 1) return LocalCommunicators(ranks);
  if (ranks % hosts.count != 0) {
    if (hosts.number > 0) return {};
    return LocalCommunicators(ranks);
  }

  static int calls = 0;
  const std::string prefix =
      absl::StrCat(Required("RINGLEADER_TEST_RENDEZVOUS"), "/", ++calls, "-");
  const int here = ranks / hosts.count, first = here * hosts.number;
  std::vector<std::unique_ptr<GrpcListener>> listeners;
  for (int rank = first; rank < first + here; ++rank) {
    listeners.push_back(
        GrpcListener::Listen({.rank = rank, .size = ranks, .fencing_token = 7}).value());
    Publish(absl::StrCat(prefix, rank), listeners.back()->address());
  }
  std::vector<std::string> addresses;
  addresses.reserve(ranks);
  for (int rank = 0; rank < ranks; ++rank) addresses.push_back(Await(absl::StrCat(prefix, rank)));

  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> connected(here);
  std::vector<std::thread> threads;
  threads.reserve(here);
  for (int i = 0; i < here; ++i) {
    threads.emplace_back([&, i] { connected[i] = listeners[i]->Connect(addresses); });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& each : connected) {
    if (!each.ok()) throw std::runtime_error(each.status().ToString());
    communicators.push_back(*std::move(each));
  }
  return communicators;
}

}  // namespace ringleader::comm::testing
