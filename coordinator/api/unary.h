// Runs unary handlers off gRPC's threads, and does what is the same for all of them.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "coordinator/access/audit_log.h"
#include "coordinator/access/caller.h"
#include "coordinator/access/gate.h"
#include "coordinator/api/executor.h"
#include "coordinator/api/rpc_metrics.h"

namespace ringleader::api {

// One call that changes something: who makes it, and its line in the audit log.
struct Change {
  access::Caller caller;
  v1::AuditRecord record;  // without outcome
  std::string method;      // e.g. "CreateJob"
};

// Thread-safe.
class Unary {
 public:
  // None may go before the last call has ended.
  Unary(Executor* executor, RpcMetrics* metrics, access::Gate* gate, access::AuditLog* audit)
      : executor_(*executor), metrics_(*metrics), gate_(*gate), audit_(*audit) {}

  // Runs `handler` on the executor, if the gate admits the caller, and ends the call with its
  // status; the request and reply that it captured live until then. RESOURCE_EXHAUSTED when too
  // many calls wait; a call that its client gave up while it waited is not begun.
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, const std::string& service,
                                const std::string& method, std::function<absl::Status()> handler);

  // The same of a call that changes `resource`. Its failure goes into the audit log from here; its
  // success in the transaction that it is one of, by KeyOf().
  template <typename Request>
  grpc::ServerUnaryReactor* RunChange(grpc::CallbackServerContext* context,
                                      const std::string& service, const std::string& method,
                                      const std::string& resource, const Request& request,
                                      std::function<absl::Status(const Change&)> handler) {
    return RunAs(context, service, method,
                 AuditedHandler(*context, service, method, resource, request.request_id(),
                                std::move(handler)));
  }

 private:
  using CallerHandler = std::function<absl::Status(const access::Caller&)>;
  grpc::ServerUnaryReactor* RunAs(grpc::CallbackServerContext* context, const std::string& service,
                                  const std::string& method, CallerHandler handler);
  CallerHandler AuditedHandler(const grpc::CallbackServerContext& context,
                               const std::string& service, const std::string& method,
                               const std::string& resource, const std::string& request_id,
                               std::function<absl::Status(const Change&)> handler);

  Executor& executor_;
  RpcMetrics& metrics_;
  access::Gate& gate_;
  access::AuditLog& audit_;
};

}  // namespace ringleader::api
