// gRPC serves Health/Watch itself, and takes any number of them.
#pragma once

#include <grpcpp/support/server_interceptor.h>

#include "coordinator/limits/quota.h"

namespace ringleader::api {

// Gives each open Health/Watch a place among those of the address that it comes from, and cancels
// those for which there is none. Thread-safe.
class HealthWatches : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  // `open` must outlive the server.
  explicit HealthWatches(limits::Quota* open) : open_(*open) {}

  // Null for all other methods.
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* call) override;

 private:
  limits::Quota& open_;
};

}  // namespace ringleader::api
