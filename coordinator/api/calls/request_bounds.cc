#include "coordinator/api/calls/request_bounds.h"

#include <google/protobuf/message.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/server_callback.h>

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/net/grpc_status.h"
#include "base/net/message_size.h"
#include "coordinator/access/caller.h"
#include "coordinator/session/parse_cost.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::api {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::MethodDescriptor;
using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::ServerRpcInfo;
using grpc::internal::MethodHandler;
using grpc::internal::RpcMethod;

struct Bounds {
  size_t wire_bytes = 0;
  size_t parsed_bytes = 0;
};

// Whether calls of the method change something: those alone bring the id of a request.
bool IsChange(const MethodDescriptor& method) {
  return method.input_type()->FindFieldByName("request_id") != nullptr;
}

Bounds BoundsOf(const Descriptor& type) {
  for (int i = 0; i < type.field_count(); ++i) {
    if (type.field(i)->message_type() == v1::JobSpec::descriptor()) {
      return {.wire_bytes = kMaxRequestBytes, .parsed_bytes = kMaxParsedRequestBytes};
    }
  }
  return {.wire_bytes = kMaxPlainRequestBytes, .parsed_bytes = kMaxPlainRequestBytes};
}

// The same bytes as `buffer`, which stays its owner's.
grpc::ByteBuffer Share(grpc_byte_buffer* buffer) {
  std::vector<grpc::Slice> slices;
  grpc_byte_buffer_reader reader;
  if (grpc_byte_buffer_reader_init(&reader, buffer) != 0) {
    grpc_slice slice;
    while (grpc_byte_buffer_reader_next(&reader, &slice) != 0) {
      slices.emplace_back(slice, grpc::Slice::STEAL_REF);
    }
    grpc_byte_buffer_reader_destroy(&reader);
  }
  return {slices.data(), slices.size()};
}

absl::Status Check(const Descriptor& type, const Bounds& bounds, grpc_byte_buffer* request) {
  const size_t bytes = request == nullptr ? 0 : grpc_byte_buffer_length(request);
  if (bytes == 0) return absl::OkStatus();
  if (bytes > bounds.wire_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(type.name(), ": ", bytes, " bytes; at most ",
                                                   bounds.wire_bytes, " are allowed"));
  }
  grpc::ByteBuffer wire = Share(request);
  grpc::ProtoBufferReader reader(&wire);
  const absl::StatusOr<session::ParseCost> cost =
      session::CostToParse(type, bounds.parsed_bytes, &reader);
  if (!cost.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(type.name(), ": ", cost.status().message()));
  }
  if (cost->bytes > bounds.parsed_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        type.name(), ": its ", bytes, " bytes would take more than ", bounds.parsed_bytes,
        " in memory",
        cost->has_unknown ? "; leave out the fields that this coordinator does not know" : ""));
  }
  return absl::OkStatus();
}

class RefusedStream : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  explicit RefusedStream(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

// Of one method. Hands on to the handler of the service what it lets pass.
class BoundedHandler : public MethodHandler {
 public:
  BoundedHandler(MethodHandler* handler, const MethodDescriptor& method, access::Gate* gate,
                 RpcMetrics* metrics)
      : handler_(*handler),
        method_(method),
        bounds_(BoundsOf(*method.input_type())),
        gate_(*gate),
        metrics_(*metrics) {}

  void* Deserialize(grpc_call* call, grpc_byte_buffer* request, grpc::Status* status,
                    void** handler_data) override {
    const absl::Status refused = Check(*method_.input_type(), bounds_, request);
    if (refused.ok()) return handler_.Deserialize(call, request, status, handler_data);
    grpc_byte_buffer_destroy(request);
    *status = ToGrpcStatus(refused);
    *handler_data = this;  // which no other handler makes of it
    return nullptr;
  }

  void RunHandler(const HandlerParameter& call) override {
    if (call.internal_data != this) {
      handler_.RunHandler(call);
      return;
    }
    const std::string& service = method_.service()->name();
    if (method_.server_streaming()) {
      grpc::internal::CallbackServerStreamingHandler<grpc::ByteBuffer, grpc::ByteBuffer> refusal(
          [&](grpc::CallbackServerContext* context, const grpc::ByteBuffer*) {
            const grpc::Status status = Refuse(*context, call.status);
            metrics_.StreamOpened(service, method_.name());
            metrics_.StreamDone(service, method_.name(), status.error_code());
            return new RefusedStream(status);
          });
      RunEmpty(refusal, call);
    } else {
      grpc::internal::CallbackUnaryHandler<grpc::ByteBuffer, grpc::ByteBuffer> refusal(
          [&](grpc::CallbackServerContext* context, const grpc::ByteBuffer*, grpc::ByteBuffer*) {
            const grpc::Status status = Refuse(*context, call.status);
            metrics_.UnaryDone(service, method_.name(), status.error_code(), absl::ZeroDuration());
            grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
            reactor->Finish(status);
            return reactor;
          });
      RunEmpty(refusal, call);
    }
  }

 private:
  // What the caller is told. Whoever may not call the method hears that instead, as from its
  // handler; that is noted, and so is a change of whoever may.
  grpc::Status Refuse(const grpc::CallbackServerContext& context, const grpc::Status& refused) {
    const absl::StatusOr<access::Caller> caller =
        gate_.Admit(context, method_.service()->name(), method_.name(), /*resource=*/"");
    if (!caller.ok()) return ToGrpcStatus(caller.status());
    if (IsChange(method_)) {
      const auto code = static_cast<absl::StatusCode>(refused.error_code());
      gate_.NoteRefused(*caller, context.peer(),
                        absl::StrCat("/", method_.service()->full_name(), "/", method_.name()),
                        /*resource=*/"", absl::Status(code, refused.error_message()));
    }
    return refused;
  }

  // As if the call had come with no bytes.
  static void RunEmpty(MethodHandler& handler, const HandlerParameter& call) {
    grpc::Status status;
    void* data = nullptr;
    void* const request = handler.Deserialize(
        call.call->call(), grpc_raw_byte_buffer_create(nullptr, 0), &status, &data);
    handler.RunHandler(
        {call.call, call.server_context, request, status, data, call.call_requester});
  }

  MethodHandler& handler_;
  const MethodDescriptor& method_;
  const Bounds bounds_;
  access::Gate& gate_;
  RpcMetrics& metrics_;
};

// What a service tells its derived classes alone.
class Handlers : public grpc::Service {
 public:
  static MethodHandler* Of(grpc::Service* service, int index) {
    return (service->*&Handlers::GetHandler)(index);
  }
};

RpcMethod::RpcType TypeOf(const MethodDescriptor& method) {
  if (method.client_streaming()) {
    return method.server_streaming() ? RpcMethod::BIDI_STREAMING : RpcMethod::CLIENT_STREAMING;
  }
  return method.server_streaming() ? RpcMethod::SERVER_STREAMING : RpcMethod::NORMAL_RPC;
}

constexpr absl::string_view kHealth = "/grpc.health.v1.Health/";
constexpr absl::string_view kReflection = "/grpc.reflection.";

class OwnRequest : public grpc::experimental::Interceptor {
 public:
  explicit OwnRequest(ServerRpcInfo* call) : call_(*call) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE)) {
      const void* const request = methods->GetRecvMessage();
      if (request != nullptr && BytesOf(request) > kMaxPlainRequestBytes) {
        call_.server_context()->TryCancel();
      }
    }
    methods->Proceed();
  }

 private:
  // Health parses its requests itself.
  size_t BytesOf(const void* request) const {
    return absl::StartsWith(call_.method(), kHealth)
               ? static_cast<const grpc::ByteBuffer*>(request)->Length()
               : static_cast<const google::protobuf::Message*>(request)->SpaceUsedLong();
  }

  ServerRpcInfo& call_;
};

}  // namespace

BoundedService::BoundedService(grpc::Service* service,
                               const google::protobuf::ServiceDescriptor& methods,
                               access::Gate* gate, RpcMetrics* metrics) {
  for (int i = 0; i < methods.method_count(); ++i) {
    const MethodDescriptor& method = *methods.method(i);
    const std::string& path =
        paths_.emplace_back(absl::StrCat("/", methods.full_name(), "/", method.name()));
    AddMethod(new grpc::internal::RpcServiceMethod(path.c_str(), TypeOf(method), nullptr));
    MarkMethodCallback(i, new BoundedHandler(Handlers::Of(service, i), method, gate, metrics));
  }
}

grpc::experimental::Interceptor* OwnRequestBounds::CreateServerInterceptor(ServerRpcInfo* call) {
  return absl::StartsWith(call->method(), kHealth) || absl::StartsWith(call->method(), kReflection)
             ? new OwnRequest(call)
             : nullptr;
}

}  // namespace ringleader::api
