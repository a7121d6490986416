#include "coordinator/api/unary.h"

#include <utility>

#include "absl/time/clock.h"
#include "base/net/grpc_status.h"

namespace ringleader::api {

grpc::ServerUnaryReactor* Unary::Run(grpc::CallbackServerContext* context,
                                     const std::string& service, const std::string& method,
                                     std::function<absl::Status()> handler) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::Time arrival = absl::Now();
  // Finish() is the last thing done: the context, the request and the reply are gone after it.
  const auto finish = [this, reactor, service, method, arrival](const absl::Status& status) {
    const grpc::Status reply = ToGrpcStatus(status);
    metrics_.UnaryDone(service, method, reply.error_code(), absl::Now() - arrival);
    reactor->Finish(reply);
  };
  const bool queued = executor_.TryRun([context, finish, handler = std::move(handler)] {
    finish(context->IsCancelled() ? absl::CancelledError("the caller gave up") : handler());
  });
  if (!queued)
    finish(absl::ResourceExhaustedError("the coordinator is busy; try again in a moment"));
  return reactor;
}

}  // namespace ringleader::api
