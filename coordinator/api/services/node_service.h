// NodeService: the machines, and taking them out of service.
#pragma once

#include "coordinator/api/calls/unary.h"
#include "coordinator/lifecycle/job_controller.h"
#include "coordinator/store/store.h"
#include "ringleader/v1/node_service.grpc.pb.h"

namespace ringleader::api {

class NodeService : public v1::NodeService::CallbackService {
 public:
  NodeService(lifecycle::JobController* controller, store::Store* store, Unary* unary)
      : controller_(*controller), store_(*store), unary_(*unary) {}

  grpc::ServerUnaryReactor* ListNodes(grpc::CallbackServerContext* context,
                                      const v1::ListNodesRequest* request,
                                      v1::ListNodesResponse* reply) override;
  grpc::ServerUnaryReactor* DrainNode(grpc::CallbackServerContext* context,
                                      const v1::DrainNodeRequest* request,
                                      v1::Node* reply) override;
  grpc::ServerUnaryReactor* UndrainNode(grpc::CallbackServerContext* context,
                                        const v1::UndrainNodeRequest* request,
                                        v1::Node* reply) override;
  grpc::ServerUnaryReactor* ListLatency(grpc::CallbackServerContext* context,
                                        const v1::ListLatencyRequest* request,
                                        v1::ListLatencyResponse* reply) override;

 private:
  absl::Status List(const v1::ListNodesRequest& request, v1::ListNodesResponse* reply);

  absl::Status ListMeasured(v1::ListLatencyResponse* reply);

  lifecycle::JobController& controller_;
  store::Store& store_;
  Unary& unary_;
};

}  // namespace ringleader::api
