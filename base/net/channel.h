// gRPC channels from programs to the coordinator.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/net/tls.h"

namespace ringleader {

// A channel to `address`, which is dialled again after a second at most: whoever calls waits by a
// back-off of its own, and finds a coordinator that restarted soon. `token`, if not empty, goes
// with each call. A proxy comes between only if `grpc_proxy` in the environment names one (and
// `no_grpc_proxy` does not except the address); `http_proxy` and `https_proxy` are for the web.
// Nothing is sent yet; errors as in ParseAddress() and ChannelCredentials().
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& address,
                                                           const TlsOptions& tls,
                                                           std::string_view token = "",
                                                           grpc::ChannelArguments arguments = {});

// gRPC's message of a call for which there was no connection, and what it means where the two sides
// do not agree on TLS: gRPC names what its libraries met, not what to change.
std::string ExplainConnection(const std::string& message);

}  // namespace ringleader
