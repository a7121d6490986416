#include "coordinator/api/services/node_service.h"

#include <utility>

#include "base/status_macros.h"
#include "coordinator/api/services/listing.h"
#include "coordinator/api/services/requests.h"

namespace ringleader::api {
namespace {

constexpr char kService[] = "NodeService";

}  // namespace

grpc::ServerUnaryReactor* NodeService::ListNodes(grpc::CallbackServerContext* context,
                                                 const v1::ListNodesRequest* request,
                                                 v1::ListNodesResponse* reply) {
  return unary_.Run(context, kService, "ListNodes", "", *reply,
                    [this, request, reply] { return List(*request, reply); });
}

absl::Status NodeService::List(const v1::ListNodesRequest& request, v1::ListNodesResponse* reply) {
  ASSIGN_OR_RETURN(const int page_size, PageSize(request.page_size()));
  ASSIGN_OR_RETURN(const std::string after, ParsePageToken(request.page_token(), "ListNodes"));
  if (FillPage(controller_.ListNodes(), after, page_size, reply->mutable_nodes())) {
    reply->set_next_page_token(MakePageToken(reply->nodes().rbegin()->name(), "ListNodes"));
  }
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* NodeService::ListLatency(grpc::CallbackServerContext* context,
                                                   const v1::ListLatencyRequest* request,
                                                   v1::ListLatencyResponse* reply) {
  return unary_.Run(context, kService, "ListLatency", "", *reply,
                    [this, reply] { return ListMeasured(reply); });
}

absl::Status NodeService::ListMeasured(v1::ListLatencyResponse* reply) {
  return store_.Read([&](store::ReadTransaction& transaction) -> absl::Status {
    ASSIGN_OR_RETURN(const store::MeasurementList list, transaction.ListMeasurements());
    // Whoever exports the tables is not given a part for the whole.
    if (!list.damaged.empty()) return list.damaged.front();
    reply->mutable_tables()->Assign(list.tables.begin(), list.tables.end());
    reply->mutable_links()->Assign(list.links.begin(), list.links.end());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* NodeService::DrainNode(grpc::CallbackServerContext* context,
                                                 const v1::DrainNodeRequest* request,
                                                 v1::Node* reply) {
  return unary_.RunChange(context, kService, "DrainNode", request->name(), *request, *reply,
                          [this, request, reply](const Change& change) -> absl::Status {
                            ASSIGN_OR_RETURN(const std::string id,
                                             store::NodeIdFromName(request->name()));
                            ASSIGN_OR_RETURN(const store::RequestKey key, KeyOf(change, *request));
                            ASSIGN_OR_RETURN(*reply, controller_.DrainNode(id, key));
                            return absl::OkStatus();
                          });
}

grpc::ServerUnaryReactor* NodeService::UndrainNode(grpc::CallbackServerContext* context,
                                                   const v1::UndrainNodeRequest* request,
                                                   v1::Node* reply) {
  return unary_.RunChange(context, kService, "UndrainNode", request->name(), *request, *reply,
                          [this, request, reply](const Change& change) -> absl::Status {
                            ASSIGN_OR_RETURN(const std::string id,
                                             store::NodeIdFromName(request->name()));
                            ASSIGN_OR_RETURN(const store::RequestKey key, KeyOf(change, *request));
                            ASSIGN_OR_RETURN(*reply, controller_.UndrainNode(id, key));
                            return absl::OkStatus();
                          });
}

}  // namespace ringleader::api
