// gRPC serves the calls of grpc.health.v1.Health itself, and takes any number of them.
#pragma once

#include <grpcpp/support/server_interceptor.h>

#include "coordinator/limits/quota.h"

namespace ringleader::api {

// Gives each of them a place among those of the address that it comes from, until it is over, and
// cancels those for which there is none. Thread-safe.
class HealthCalls : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  // `open` must outlive the server.
  explicit HealthCalls(limits::Quota* open) : open_(*open) {}

  // Null for all other methods.
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* call) override;

 private:
  limits::Quota& open_;
};

}  // namespace ringleader::api
