#include "base/net/channel.h"

#include <grpcpp/create_channel.h>

#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/net/address.h"
#include "base/status_macros.h"

namespace ringleader {
namespace {

struct Explanation {
  const char* sign;  // part of gRPC's or OpenSSL's message
  const char* meaning;
};

constexpr Explanation kExplanations[] = {
    {"wrong version number",
     "TLS mismatch: the other side speaks plain text; leave out --tls-cert, --tls-key and "
     "--tls-ca, "
     "or give them to it, too"},
    {"certificate verify failed",
     "TLS mismatch: its certificate is not signed by --tls-ca, or has expired"},
    {"Handshake read failed",
     "TLS mismatch: one side does not accept the other's certificate, which --tls-ca must have "
     "signed, for this name, and which must not have expired"},
    {"Socket closed",
     "if it speaks TLS, this side needs --tls-ca, and --tls-cert and --tls-key or a token"},
};

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& address,
                                                           const TlsOptions& tls,
                                                           std::string_view token,
                                                           grpc::ChannelArguments arguments) {
  ASSIGN_OR_RETURN(const Address parsed, ParseAddress(address));
  ASSIGN_OR_RETURN(const std::shared_ptr<grpc::ChannelCredentials> credentials,
                   ChannelCredentials(tls, parsed, token));
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // No back-off, whatever its name says: the least time that one try to connect is given. TCP, TLS
  // and HTTP/2 take four round trips, and a busy machine takes its own time.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 10'000);
  // gRPC would also take the proxies for downloads, on loopback, too.
  if (std::getenv("grpc_proxy") == nullptr) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(FormatAddress(parsed), credentials, arguments);
}

std::string ExplainConnection(const std::string& message) {
  for (const Explanation& explanation : kExplanations) {
    if (!absl::StrContains(message, explanation.sign)) continue;
    return absl::StrCat(message, "; ", explanation.meaning);
  }
  return message;
}

}  // namespace ringleader
