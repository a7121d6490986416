#include "coordinator/api/unary.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/net/grpc_status.h"

namespace ringleader::api {
namespace {

// What a caller wrote and nobody has checked yet, for the audit log.
std::string Shortened(const std::string& text) {
  constexpr size_t kMaxBytes = 200;
  return absl::CHexEscape(text.substr(0, kMaxBytes)).substr(0, kMaxBytes);
}

}  // namespace

grpc::ServerUnaryReactor* Unary::Run(grpc::CallbackServerContext* context,
                                     const std::string& service, const std::string& method,
                                     std::function<absl::Status()> handler) {
  return RunAs(context, service, method,
               [handler = std::move(handler)](const access::Caller&) { return handler(); });
}

grpc::ServerUnaryReactor* Unary::RunAs(grpc::CallbackServerContext* context,
                                       const std::string& service, const std::string& method,
                                       CallerHandler handler) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::Time arrival = absl::Now();
  // Finish() is the last thing done: the context, the request and the reply are gone after it.
  const auto finish = [this, reactor, service, method, arrival](const absl::Status& status) {
    const grpc::Status reply = ToGrpcStatus(status);
    metrics_.UnaryDone(service, method, reply.error_code(), absl::Now() - arrival);
    reactor->Finish(reply);
  };
  absl::StatusOr<access::Caller> caller = gate_.Admit(*context, service, method);
  if (!caller.ok()) {
    finish(caller.status());
    return reactor;
  }
  const bool queued = executor_.TryRun([context, finish, caller = *std::move(caller),
                                        handler = std::move(handler)] {
    finish(context->IsCancelled() ? absl::CancelledError("the caller gave up") : handler(caller));
  });
  if (!queued)
    finish(absl::ResourceExhaustedError("the coordinator is busy; try again in a moment"));
  return reactor;
}

Unary::CallerHandler Unary::AuditedHandler(const grpc::CallbackServerContext& context,
                                           const std::string& service, const std::string& method,
                                           const std::string& resource,
                                           const std::string& request_id,
                                           std::function<absl::Status(const Change&)> handler) {
  return [this, address = context.peer(), name = absl::StrCat(service, ".", method), method,
          resource = Shortened(resource), request_id = Shortened(request_id),
          handler = std::move(handler)](const access::Caller& caller) {
    Change change = {
        .caller = caller, .record = access::RecordOf(caller, address), .method = method};
    change.record.set_method(name);
    change.record.set_resource(resource);
    change.record.set_request_id(request_id);
    absl::Status status = handler(change);
    if (!status.ok()) audit_.Note(change.record, status);
    return status;
  };
}

}  // namespace ringleader::api
