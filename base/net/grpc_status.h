// The one place where an absl::Status of a service becomes what a gRPC client sees.
#pragma once

#include <grpcpp/support/status.h>

#include <string_view>

#include "absl/status/status.h"

namespace ringleader {

inline constexpr std::string_view kErrorDomain = "ringleader";

// The code by the table in grpc_status.cc, the message as it is, and google.rpc.ErrorInfo {reason,
// domain "ringleader"}. INTERNAL and UNKNOWN are logged.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace ringleader
