// gRPC channels from programs to the coordinator.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/net/tls.h"

namespace ringleader {

// A channel to `address`, which is dialled again after a second at most: whoever calls waits by a
// back-off of its own, and finds a coordinator that restarted soon. Nothing is sent yet; errors as
// in ParseAddress() and ChannelCredentials().
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& address,
                                                           const TlsOptions& tls,
                                                           grpc::ChannelArguments arguments = {});

}  // namespace ringleader
