// What a request may take in memory. gRPC parses whatever comes before anybody can ask who sent it,
// and keeps what it parsed until the call is over, which for a stream may be days.
#pragma once

#include <google/protobuf/descriptor.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/support/server_interceptor.h>

#include <list>
#include <string>

#include "coordinator/access/gate.h"
#include "coordinator/api/calls/rpc_metrics.h"

namespace ringleader::api {

// All methods of a service, whose requests are looked at before they are parsed: those that are no
// message, or would take more than requests of their type need, are refused with INVALID_ARGUMENT.
// Changes that are refused so are noted in the audit log, without what they would have changed,
// which nobody has read; not so those that gRPC does not read, of more than kMaxRequestBytes. To be
// registered in the place of `service`. What a client streams is looked at by its handler.
class BoundedService : public grpc::Service {
 public:
  // `service` serves `methods` with callbacks, in their order, as generated code does. All must
  // outlive this.
  BoundedService(grpc::Service* service, const google::protobuf::ServiceDescriptor& methods,
                 access::Gate* gate, RpcMetrics* metrics);

 private:
  std::list<std::string> paths_;  // gRPC keeps pointers to them
};

// The same of the services that gRPC brings itself, health and reflection: there the call is
// cancelled. Thread-safe.
class OwnRequestBounds : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  // Null for all other methods.
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* call) override;
};

}  // namespace ringleader::api
