// What the page asks for, as JSON: each answer is a message of the gRPC services, with the names of
// its fields. docs/page.md lists the addresses.
#pragma once

#include <grpcpp/channel.h>

#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ringleader/v1/job_service.grpc.pb.h"
#include "ringleader/v1/log_service.grpc.pb.h"
#include "ringleader/v1/node_service.grpc.pb.h"

namespace ringleader::page {

// What a browser sent: the arguments after the question mark, its token and its certificate.
struct PageRequest {
  std::multimap<std::string, std::string> arguments = {};
  std::string authorization = {};  // "Bearer TOKEN"; empty: none
  std::string certificate = {};    // DER, verified; empty: none
};

// Thread-safe. Errors are those of the services; INVALID_ARGUMENT names an argument that is no
// number, or no plain text. `job`: its id.
class PageApi {
 public:
  // `voucher`: by which the coordinator believes what the page says of certificates.
  PageApi(const std::shared_ptr<grpc::Channel>& coordinator, std::string voucher);

  // page_size, page_token and filter as in ListJobsRequest.
  absl::StatusOr<std::string> Jobs(const PageRequest& request) const;
  absl::StatusOr<std::string> Job(const std::string& job, const PageRequest& request) const;
  // points and detail_points as in GetJobHistoryRequest.
  absl::StatusOr<std::string> History(const std::string& job, const PageRequest& request) const;
  // attempt and rank as in TailLogsRequest. The last `lines` (200, at most 1,000) lines, or, with
  // `after`, the first ones after that offset.
  absl::StatusOr<std::string> Logs(const std::string& job, const PageRequest& request) const;
  // page_size and page_token as in ListNodesRequest.
  absl::StatusOr<std::string> Nodes(const PageRequest& request) const;

 private:
  const std::string voucher_;
  const std::unique_ptr<v1::JobService::StubInterface> jobs_;
  const std::unique_ptr<v1::LogService::StubInterface> logs_;
  const std::unique_ptr<v1::NodeService::StubInterface> nodes_;
};

}  // namespace ringleader::page
