#include "coordinator/api/calls/health_calls.h"

#include <grpcpp/server_context.h>

#include <string_view>

#include "absl/status/statusor.h"
#include "coordinator/access/caller.h"
#include "coordinator/limits/client_name.h"

namespace ringleader::api {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::ServerRpcInfo;

// One call's. gRPC deletes it with the call.
class Place : public grpc::experimental::Interceptor {
 public:
  Place(limits::Quota* open, ServerRpcInfo* call) : open_(*open), call_(*call) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      hold_ = open_.Take(limits::ClientOf(access::Caller(), call_.server_context()->peer()));
      if (!hold_.ok()) call_.server_context()->TryCancel();
    }
    methods->Proceed();
  }

 private:
  limits::Quota& open_;
  ServerRpcInfo& call_;
  absl::StatusOr<limits::Quota::Hold> hold_;
};

}  // namespace

grpc::experimental::Interceptor* HealthCalls::CreateServerInterceptor(ServerRpcInfo* call) {
  constexpr std::string_view kHealth = "/grpc.health.v1.Health/";
  const std::string_view method = call->method();
  return method.substr(0, kHealth.size()) == kHealth ? new Place(&open_, call) : nullptr;
}

}  // namespace ringleader::api
