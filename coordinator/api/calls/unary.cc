#include "coordinator/api/calls/unary.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/net/grpc_status.h"
#include "base/net/notice.h"
#include "base/status_macros.h"
#include "coordinator/api/calls/delivery.h"
#include "coordinator/limits/client_name.h"

namespace ringleader::api {
// What a call holds while it is under way.
struct Unary::Holds {
  limits::Quota::Hold call;
  limits::Quota::Hold check;
};

// One call, from its arrival until its answer is read. Deletes itself.
class Unary::Call : public grpc::ServerUnaryReactor {
 public:
  Call(Unary* unary, const grpc::CallbackServerContext& context, std::string service,
       std::string method, bool is_change, const google::protobuf::Message& reply)
      : unary_(*unary),
        context_(context),
        service_(std::move(service)),
        method_(std::move(method)),
        is_change_(is_change),
        reply_(reply) {}

  // The last thing that is done with the call: the context, the request and the reply are gone
  // after it. `client` as by limits::ClientOf, empty for one that was not admitted.
  void End(const std::string& client, absl::Status status) {
    limits::Quota& unread = unary_.limits_.unread_answers;
    const absl::Duration patience = unary_.unread_patience_;
    if (status.ok() && is_change_) {  // what was made is told
      delivery_.BeginAnyway(&unread, client, reply_.ByteSizeLong(), context_, patience);
    } else if (status.ok()) {
      status = delivery_.Begin(&unread, client, reply_.ByteSizeLong(), context_, patience);
    }
    const grpc::Status answer = ToGrpcStatus(status);
    unary_.metrics_.UnaryDone(service_, method_, answer.error_code(), absl::Now() - arrival_);
    Finish(answer);
  }

 private:
  void OnDone() override { delete this; }

  Unary& unary_;
  const grpc::CallbackServerContext& context_;
  const std::string service_;
  const std::string method_;
  const bool is_change_;
  const google::protobuf::Message& reply_;
  const absl::Time arrival_ = absl::Now();
  Delivery delivery_;
};

absl::StatusOr<std::shared_ptr<Unary::Holds>> Unary::Admit(const std::string& client, Pace pace,
                                                           size_t bytes) {
  auto holds = std::make_shared<Holds>();
  ASSIGN_OR_RETURN(holds->call, limits_.calls.Take(client));
  if (pace == Pace::kSlow) {
    ASSIGN_OR_RETURN(holds->check, limits_.checks.Take(client));
    RETURN_IF_ERROR(limits_.submitted.Spend(client, static_cast<int64_t>(bytes)));
  }
  return holds;
}

grpc::ServerUnaryReactor* Unary::Run(grpc::CallbackServerContext* context,
                                     const std::string& service, const std::string& method,
                                     const std::string& resource,
                                     const google::protobuf::Message& reply,
                                     std::function<absl::Status()> handler) {
  return RunAtPace(
      context, service, method, resource, Pace::kQuick, 0, /*is_change=*/false, reply,
      AtOnce([handler = std::move(handler)](const access::Caller&) { return handler(); }));
}

grpc::ServerUnaryReactor* Unary::RunCheck(grpc::CallbackServerContext* context,
                                          const std::string& service, const std::string& method,
                                          const std::string& resource, size_t bytes,
                                          const google::protobuf::Message& reply,
                                          CallerHandler handler) {
  return RunAtPace(context, service, method, resource, Pace::kSlow, bytes, /*is_change=*/false,
                   reply, AtOnce(std::move(handler)));
}

grpc::ServerUnaryReactor* Unary::RunLateCheck(grpc::CallbackServerContext* context,
                                              const std::string& service, const std::string& method,
                                              const std::string& resource, size_t bytes,
                                              const google::protobuf::Message& reply,
                                              LateHandler handler) {
  return RunAtPace(context, service, method, resource, Pace::kSlow, bytes, /*is_change=*/false,
                   reply, std::move(handler));
}

grpc::ServerUnaryReactor* Unary::RunAtPace(grpc::CallbackServerContext* context,
                                           const std::string& service, const std::string& method,
                                           const std::string& resource, Pace pace, size_t bytes,
                                           bool is_change, const google::protobuf::Message& reply,
                                           LateHandler handler) {
  Call* const call = new Call(this, *context, service, method, is_change, reply);
  if (const absl::Status writable = store_.Writable(); !writable.ok()) {
    context->AddTrailingMetadata(kNoticeKey, absl::CHexEscape(std::string(writable.message())));
  }
  absl::StatusOr<access::Caller> caller = gate_.Admit(*context, service, method, resource);
  if (!caller.ok()) {
    call->End("", caller.status());
    return call;
  }
  const std::string client = limits::ClientOf(*caller, context->peer());
  absl::StatusOr<std::shared_ptr<Holds>> holds = Admit(client, pace, bytes);
  if (!holds.ok()) {
    if (is_change) {
      gate_.NoteRefused(*caller, context->peer(),
                        absl::StrCat("/ringleader.v1.", service, "/", method), resource,
                        holds.status());
    }
    call->End(client, holds.status());
    return call;
  }
  Answer answer = [call, client, holds = *std::move(holds)](const absl::Status& status) {
    // Who makes one call after the other has one under way, not two.
    *holds = {};
    call->End(client, status);
  };
  executor_.Run(client, pace,
                [context, caller = *std::move(caller), handler = std::move(handler),
                 answer = std::move(answer)] {
                  if (context->IsCancelled()) {
                    answer(absl::CancelledError("the caller gave up"));
                  } else {
                    handler(caller, answer);
                  }
                });
  return call;
}

Unary::CallerHandler Unary::AuditedHandler(const grpc::CallbackServerContext& context,
                                           const std::string& service, const std::string& method,
                                           const std::string& resource,
                                           const std::string& request_id,
                                           std::function<absl::Status(const Change&)> handler) {
  return [this, address = context.peer(), name = absl::StrCat(service, ".", method), method,
          resource = access::RecordText(resource), request_id = access::RecordText(request_id),
          handler = std::move(handler)](const access::Caller& caller) {
    Change change = {
        .caller = caller, .record = access::RecordOf(caller, address), .method = method};
    change.record.set_method(name);
    change.record.set_resource(resource);
    change.record.set_request_id(request_id);
    // Before anything is changed. What others leave unread keeps nobody from cancelling a job.
    absl::Status status = limits_.unread_answers.CheckShare(limits::ClientOf(caller, address));
    if (status.ok()) status = handler(change);
    if (!status.ok()) audit_.Note(change.record, status);
    return status;
  };
}

}  // namespace ringleader::api
