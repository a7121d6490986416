// Mutual TLS for everything that speaks gRPC: the flags, and the credentials that follow from them.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/net/address.h"

namespace CLI {
class App;
}
namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace ringleader {

struct TlsOptions {
  std::string cert_path;  // PEM: this process's certificate chain
  std::string key_path;   // PEM: its private key
  std::string ca_path;    // PEM: the authorities whose certificates a peer may show
  bool insecure = false;  // plain text off loopback, too

  bool enabled() const { return !cert_path.empty(); }
};

// --tls-cert, --tls-key, --tls-ca, --insecure. `options` must outlive the parse.
void AddTlsFlags(CLI::App& app, TlsOptions* options);

// With certificates: mutual TLS; both sides must show one that --tls-ca signed. Without: plain
// text, but FAILED_PRECONDITION unless `address` is loopback or --insecure was given.
// INVALID_ARGUMENT names the flag whose file is missing or is no PEM, and a key that does not
// belong to its certificate.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ServerCredentials(
    const TlsOptions& options, const Address& address);
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ChannelCredentials(
    const TlsOptions& options, const Address& address);

}  // namespace ringleader
