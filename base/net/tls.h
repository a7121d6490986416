// Mutual TLS for everything that speaks gRPC: the flags, and the credentials that follow from them.
#pragma once

#include <memory>
#include <string>
#include <string_view>

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
  // A client that may do without a certificate: --tls-ca alone will do.
  bool authority_alone = false;

  bool enabled() const { return !cert_path.empty(); }
};

// --tls-cert, --tls-key, --tls-ca, --insecure. `options` must outlive the parse.
void AddTlsFlags(CLI::App& app, TlsOptions* options);

// How soon a certificate, key or authority that was replaced in its file is taken up. Connections
// that are open stay as they are.
inline constexpr int kTlsReloadSeconds = 2;

// Whether a server hangs up on clients that show no certificate, or leaves it to what looks at each
// call, because some show a token instead. A certificate that is shown must be good in both.
enum class ClientCertificate { kRequired, kOptional };

// Where options name certificates, both sides must show one that --tls-ca signed (mutual TLS).
// Where they name none, traffic is plain text: FAILED_PRECONDITION unless `address` is loopback or
// --insecure was given.
// INVALID_ARGUMENT names the flag whose file is missing or is no PEM, a key that does not belong to
// its certificate, and a certificate that has expired.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ServerCredentials(
    const TlsOptions& options, const Address& address,
    ClientCertificate client = ClientCertificate::kRequired);
// `token`, if not empty, goes with each call; then --tls-ca alone will do, and plain text is
// FAILED_PRECONDITION: whoever listens would have the token.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ChannelCredentials(
    const TlsOptions& options, const Address& address, std::string_view token = "");

}  // namespace ringleader
