// The Communicator of CPU trainers: gRPC streams between processes, on this node and others.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/net/tls.h"
#include "worker/comm/communicator.h"

namespace ringleader::comm {

class GrpcTransport;

struct GrpcCommunicatorOptions {
  int rank = 0;
  int size = 1;
  // Streams that do not carry it are refused: a rank of a replaced attempt cannot mix in.
  uint64_t fencing_token = 0;
  std::string listen_host = "127.0.0.1";
  // Mutual between ranks: the one certificate of a node is shown by who listens and by who dials,
  // so that it must be valid for `listen_host`. Without it only loopback, unless `insecure`.
  TlsOptions tls = {};
  absl::Duration connect_timeout = absl::Seconds(60);
};

// Listens, so that the address can be handed to the other ranks, then connects to them.
//
//   ASSIGN_OR_RETURN(auto listener, GrpcListener::Listen(options));
//   … tell the others listener->address(), hear theirs …
//   ASSIGN_OR_RETURN(auto communicator, listener->Connect(addresses));
//
// A rank that dies is noticed by its broken streams: its peers' communicators abort with "rank N is
// gone". To leave in order, destroy the communicator after a last Barrier.
class GrpcListener {
 public:
  // Listens on a port that the system picks. FAILED_PRECONDITION for plain text off loopback,
  // INVALID_ARGUMENT for certificates that cannot work.
  static absl::StatusOr<std::unique_ptr<GrpcListener>> Listen(
      const GrpcCommunicatorOptions& options);
  ~GrpcListener();

  const std::string& address() const;  // host:port

  // addresses: by rank. Blocks until all ranks are connected with each other; DEADLINE_EXCEEDED
  // names those that are not. May be called once.
  //
  // certificates: by rank, the name that the certificate of the rank's node has, as
  // CertificateNames::Texts() writes it. Streams of that rank are taken from nobody else; where
  // there is none, from whoever has a certificate of the authority and the fencing token.
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(
      const std::vector<std::string>& addresses, const std::vector<std::string>& certificates = {});

  // Ends a Connect that waits. Any thread may call it.
  void Abort(const std::string& reason);
  // After an abort, waits until the peers have heard of it, at most 1 s: for a process that ends
  // without taking its communicators down. Whether all have.
  bool AwaitAbortHeard();

 private:
  explicit GrpcListener(std::shared_ptr<GrpcTransport> transport);
  const std::shared_ptr<GrpcTransport> transport_;
};

}  // namespace ringleader::comm
