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
// with each call. Nothing is sent yet; errors as in ParseAddress() and ChannelCredentials().
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& address,
                                                           const TlsOptions& tls,
                                                           std::string_view token = "",
                                                           grpc::ChannelArguments arguments = {});

}  // namespace ringleader
