#include "coordinator/api/services/node_service.h"

#include <algorithm>
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
  return unary_.Run(context, kService, "ListNodes",
                    [this, request, reply] { return List(*request, reply); });
}

// A page begins after the last name of the page before: nodes that come and go shift nothing.
absl::Status NodeService::List(const v1::ListNodesRequest& request, v1::ListNodesResponse* reply) {
  ASSIGN_OR_RETURN(const int page_size, PageSize(request.page_size()));
  ASSIGN_OR_RETURN(const std::string after, ParsePageToken(request.page_token(), "ListNodes"));
  std::vector<v1::Node> nodes = controller_.ListNodes();
  const auto begin =
      std::find_if(nodes.begin(), nodes.end(), [&](const v1::Node& n) { return n.name() > after; });
  for (auto node = begin; node != nodes.end(); ++node) {
    if (reply->nodes_size() == page_size) {
      reply->set_next_page_token(MakePageToken(reply->nodes(page_size - 1).name(), "ListNodes"));
      break;
    }
    *reply->add_nodes() = std::move(*node);
  }
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* NodeService::DrainNode(grpc::CallbackServerContext* context,
                                                 const v1::DrainNodeRequest* request,
                                                 v1::Node* reply) {
  return unary_.RunChange(context, kService, "DrainNode", request->name(), *request,
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
  return unary_.RunChange(context, kService, "UndrainNode", request->name(), *request,
                          [this, request, reply](const Change& change) -> absl::Status {
                            ASSIGN_OR_RETURN(const std::string id,
                                             store::NodeIdFromName(request->name()));
                            ASSIGN_OR_RETURN(const store::RequestKey key, KeyOf(change, *request));
                            ASSIGN_OR_RETURN(*reply, controller_.UndrainNode(id, key));
                            return absl::OkStatus();
                          });
}

}  // namespace ringleader::api
