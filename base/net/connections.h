// Takes in connections over TCP or on a Unix socket for a server, a bounded number in all and of
// one client.
//
// gRPC's own listener stops listening, for good, at the first connection for which the process may
// open no further file: whoever opens enough of them, with no credentials, would shut everybody
// out.
#pragma once

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/net/address.h"

namespace ringleader {

class Connections {
 public:
  struct Bounds {
    int files;          // numbers of files below this are for connections
    size_t per_client;  // from one address, or, on a Unix socket, of one user
  };
  // Takes a connection, which does not block and is closed by whoever took it. Called on one
  // thread.
  using Sink = std::function<void(int connection)>;
  // By what this process may open: seven eighths of its files at most, and half of them a client.
  static Bounds OfThisProcess();

  // Listens on the host's addresses, or on the Unix socket, where a socket that lies there is
  // replaced. Connections wait until Serve(). ALREADY_EXISTS says that the port is in use,
  // INVALID_ARGUMENT that the address is none of this machine, or that no socket can be made there.
  static absl::StatusOr<std::unique_ptr<Connections>> Open(const Address& address,
                                                           const Bounds& bounds = OfThisProcess());
  // Takes in none any more; those that are open are the server's. A Unix socket is removed.
  ~Connections();

  int port() const { return port_; }  // 0 of a Unix socket
  // How often there was no file or memory for a connection, which then waits.
  int waits() const { return waits_; }
  // What hands connections to the server that is built, for Serve() once that has started.
  static Sink ForServer(grpc::ServerBuilder& builder,
                        std::shared_ptr<grpc::ServerCredentials> credentials);
  void Serve(Sink sink);

 private:
  // A connection that was handed over: its number, which another file may have by now, and what
  // tells that one apart.
  using Handed = std::pair<int, uint64_t>;

  explicit Connections(const Bounds& bounds) : bounds_(bounds) {}
  absl::Status Listen(const Address& address);
  absl::Status ListenAt(const std::string& path);
  // Adds a socket that listens, or returns false and errno.
  bool Add(const sockaddr* own, socklen_t size);
  void Run();
  // Takes in what waits. Returns false if there is no file to be had for it now.
  bool AcceptFrom(int listener);
  bool HasRoom(int fd, const std::string& client);

  const Bounds bounds_;
  int port_ = 0;
  std::string path_;  // of a Unix socket
  std::vector<int> listeners_;
  int stop_[2] = {-1, -1};
  Sink sink_;
  std::map<std::string, std::vector<Handed>> handed_;  // by client
  bool refusing_ = false;
  std::atomic<int> waits_ = 0;
  std::thread thread_;
};

}  // namespace ringleader
