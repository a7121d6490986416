#include "base/net/channel.h"

#include <grpcpp/create_channel.h>

#include "base/net/address.h"
#include "base/status_macros.h"

namespace ringleader {

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
  return grpc::CreateCustomChannel(FormatAddress(parsed), credentials, arguments);
}

}  // namespace ringleader
