// Takes in connections over TCP for a gRPC server, a bounded number in all and of one client.
//
// gRPC's own listener stops listening, for good, at the first connection for which the process may
// open no further file: whoever opens enough of them, with no credentials, would shut everybody
// out.
#pragma once

#include <grpcpp/server_builder.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/net/address.h"

namespace ringleader::api {

class Connections {
 public:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

  struct Bounds {
    int files;          // numbers of files below this are for connections
    size_t per_client;  // from one address
  };
  // By what this process may open: seven eighths of its files at most, and half of them a client.
  static Bounds OfThisProcess();

  // Listens on the host's addresses (not on a Unix socket). Connections wait until Serve().
  // ALREADY_EXISTS says that the port is in use.
  static absl::StatusOr<std::unique_ptr<Connections>> Open(const Address& address,
                                                           const Bounds& bounds = OfThisProcess());
  // Takes in none any more; those that are open are the server's.
  ~Connections();

  int port() const { return port_; }
  // Hands connections to the acceptor of a server that has started.
  void Serve(std::unique_ptr<Acceptor> acceptor);

 private:
  // A connection that was handed over: its number, which another file may have by now, and what
  // tells that one apart.
  using Handed = std::pair<int, uint64_t>;

  explicit Connections(const Bounds& bounds) : bounds_(bounds) {}
  absl::Status Listen(const Address& address);
  void Run();
  // Takes in what waits. Returns false if there is no file to be had for it now.
  bool AcceptFrom(int listener);
  bool HasRoom(int fd, const std::string& client);

  const Bounds bounds_;
  int port_ = 0;
  std::vector<int> listeners_;
  int stop_[2] = {-1, -1};
  std::unique_ptr<Acceptor> acceptor_;
  std::map<std::string, std::vector<Handed>> handed_;  // by client
  bool refusing_ = false;
  std::thread thread_;
};

}  // namespace ringleader::api
