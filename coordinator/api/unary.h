// Runs unary handlers off gRPC's threads, and does what is the same for all of them.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "coordinator/api/executor.h"
#include "coordinator/api/rpc_metrics.h"

namespace ringleader::api {

// Thread-safe.
class Unary {
 public:
  // Neither may go before the last call has ended.
  Unary(Executor* executor, RpcMetrics* metrics) : executor_(*executor), metrics_(*metrics) {}

  // Runs `handler` on the executor and ends the call with its status; the request and reply that it
  // captured live until then. RESOURCE_EXHAUSTED when too many calls wait; a call that its client
  // gave up while it waited is not begun.
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, const std::string& service,
                                const std::string& method, std::function<absl::Status()> handler);

 private:
  Executor& executor_;
  RpcMetrics& metrics_;
};

}  // namespace ringleader::api
