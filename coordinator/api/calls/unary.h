// Runs unary handlers off gRPC's threads, and does what is the same for all of them.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/access/audit_log.h"
#include "coordinator/access/caller.h"
#include "coordinator/access/gate.h"
#include "coordinator/api/calls/executor.h"
#include "coordinator/api/calls/rpc_metrics.h"
#include "coordinator/limits/client_limits.h"
#include "coordinator/store/store.h"

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
  using CallerHandler = std::function<absl::Status(const access::Caller&)>;
  // Ends a call with its status, on whatever thread. To be called once.
  using Answer = std::function<void(const absl::Status&)>;
  using LateHandler = std::function<void(const access::Caller&, Answer)>;

  // None may go before the last call has ended.
  Unary(Executor* executor, limits::Limits* limits, store::Store* store, RpcMetrics* metrics,
        access::Gate* gate, access::AuditLog* audit, absl::Duration unread_patience)
      : executor_(*executor),
        limits_(*limits),
        store_(*store),
        metrics_(*metrics),
        gate_(*gate),
        audit_(*audit),
        unread_patience_(unread_patience) {}

  // Runs `handler`, which fills in `reply`, on the executor, if the gate admits the caller, and
  // ends the call with its status; the request and reply that it captured live until then.
  // RESOURCE_EXHAUSTED when the client, or all, have too many calls under way, or too much of what
  // was answered is not read yet; a call that its client gave up while it waited
  // is not begun. A reply carries what is wrong with the coordinator, if anything is (kNoticeKey of
  // base/net/notice.h). `resource`: what the request names, for the record of a caller that is not
  // admitted; empty where it names nothing.
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, const std::string& service,
                                const std::string& method, const std::string& resource,
                                const google::protobuf::Message& reply,
                                std::function<absl::Status()> handler);

  // The same of a call that brings a job file of so many bytes and looks at it, which may take
  // seconds.
  grpc::ServerUnaryReactor* RunCheck(grpc::CallbackServerContext* context,
                                     const std::string& service, const std::string& method,
                                     const std::string& resource, size_t bytes,
                                     const google::protobuf::Message& reply, CallerHandler handler);

  // The same of one whose answer may come after its handler has returned: it waits on no thread.
  grpc::ServerUnaryReactor* RunLateCheck(grpc::CallbackServerContext* context,
                                         const std::string& service, const std::string& method,
                                         const std::string& resource, size_t bytes,
                                         const google::protobuf::Message& reply,
                                         LateHandler handler);

  // The same of a call that changes `resource`. Its failure, also for a limit, goes into the audit
  // log from here; its success in the transaction that it is one of, by KeyOf().
  template <typename Request>
  grpc::ServerUnaryReactor* RunChange(grpc::CallbackServerContext* context,
                                      const std::string& service, const std::string& method,
                                      const std::string& resource, const Request& request,
                                      const google::protobuf::Message& reply,
                                      std::function<absl::Status(const Change&)> handler) {
    return RunAtPace(context, service, method, resource, Pace::kQuick, 0, /*is_change=*/true, reply,
                     AtOnce(AuditedHandler(*context, service, method, resource,
                                           request.request_id(), std::move(handler))));
  }
  // Both at once.
  template <typename Request>
  grpc::ServerUnaryReactor* RunCheckedChange(grpc::CallbackServerContext* context,
                                             const std::string& service, const std::string& method,
                                             const std::string& resource, const Request& request,
                                             const google::protobuf::Message& reply,
                                             std::function<absl::Status(const Change&)> handler) {
    return RunAtPace(context, service, method, resource, Pace::kSlow, request.ByteSizeLong(),
                     /*is_change=*/true, reply,
                     AtOnce(AuditedHandler(*context, service, method, resource,
                                           request.request_id(), std::move(handler))));
  }

 private:
  class Call;
  struct Holds;
  absl::StatusOr<std::shared_ptr<Holds>> Admit(const std::string& client, Pace pace, size_t bytes);
  grpc::ServerUnaryReactor* RunAtPace(grpc::CallbackServerContext* context,
                                      const std::string& service, const std::string& method,
                                      const std::string& resource, Pace pace, size_t bytes,
                                      bool is_change, const google::protobuf::Message& reply,
                                      LateHandler handler);
  static LateHandler AtOnce(CallerHandler handler) {
    return [handler = std::move(handler)](const access::Caller& caller, const Answer& answer) {
      answer(handler(caller));
    };
  }
  CallerHandler AuditedHandler(const grpc::CallbackServerContext& context,
                               const std::string& service, const std::string& method,
                               const std::string& resource, const std::string& request_id,
                               std::function<absl::Status(const Change&)> handler);

  Executor& executor_;
  limits::Limits& limits_;
  store::Store& store_;
  RpcMetrics& metrics_;
  access::Gate& gate_;
  access::AuditLog& audit_;
  const absl::Duration unread_patience_;  // clients read answers by themselves
};

}  // namespace ringleader::api
