#include "coordinator/page/page_api.h"

#include <google/protobuf/util/json_util.h>
#include <grpcpp/client_context.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/access/gate.h"

namespace ringleader::page {
namespace {

constexpr std::chrono::seconds kDeadline(20);
constexpr int64_t kDefaultLines = 200;
constexpr int64_t kMaxLines = 1000;

bool IsPlainText(const std::string& text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isprint(static_cast<unsigned char>(c)); });
}

absl::StatusOr<std::string> Text(const PageRequest& request, const std::string& name) {
  const auto found = request.arguments.find(name);
  if (found == request.arguments.end()) return std::string();
  if (IsPlainText(found->second)) return found->second;
  return absl::InvalidArgumentError(absl::StrCat(name, ": only printable ASCII characters"));
}

absl::StatusOr<int64_t> Number(const PageRequest& request, const std::string& name,
                               int64_t otherwise, int64_t least, int64_t most) {
  const auto found = request.arguments.find(name);
  if (found == request.arguments.end()) return otherwise;
  int64_t number = 0;
  if (absl::SimpleAtoi(found->second, &number) && number >= least && number <= most) return number;
  return absl::InvalidArgumentError(absl::StrCat(name, ": a number from ", least, " to ", most));
}

constexpr int64_t kAnyInt32 = std::numeric_limits<int32_t>::max();

// The caller's certificate and token go along; gRPC would not survive a header that is no plain
// text.
absl::Status Prepare(const PageRequest& request, const std::string& voucher,
                     grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() + kDeadline);
  if (!request.certificate.empty()) {
    context->AddMetadata(access::Gate::kVoucherKey, voucher);
    context->AddMetadata(access::Gate::kCertificateKey, request.certificate);
  }
  if (request.authorization.empty()) return absl::OkStatus();
  if (!IsPlainText(request.authorization)) {
    return absl::UnauthenticatedError("authorization: \"Bearer TOKEN\" is expected");
  }
  context->AddMetadata("authorization", request.authorization);
  return absl::OkStatus();
}

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::StatusOr<std::string> Json(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  if (!status.ok()) return absl::InternalError(std::string(status.message()));
  return json;
}

// One unary call of `service`, as JSON.
template <typename Reply, typename Service, typename Request>
absl::StatusOr<std::string> Call(
    Service& service, grpc::Status (Service::*method)(grpc::ClientContext*, const Request&, Reply*),
    const Request& message, const PageRequest& request, const std::string& voucher) {
  grpc::ClientContext context;
  RETURN_IF_ERROR(Prepare(request, voucher, &context));
  Reply reply;
  RETURN_IF_ERROR(FromGrpc((service.*method)(&context, message, &reply)));
  return Json(reply);
}

}  // namespace

PageApi::PageApi(const std::shared_ptr<grpc::Channel>& coordinator, std::string voucher)
    : voucher_(std::move(voucher)),
      jobs_(v1::JobService::NewStub(coordinator)),
      logs_(v1::LogService::NewStub(coordinator)),
      nodes_(v1::NodeService::NewStub(coordinator)) {}

absl::StatusOr<std::string> PageApi::Jobs(const PageRequest& request) const {
  v1::ListJobsRequest message;
  ASSIGN_OR_RETURN(const int64_t size, Number(request, "page_size", 0, 0, kAnyInt32));
  message.set_page_size(static_cast<int32_t>(size));
  ASSIGN_OR_RETURN(*message.mutable_page_token(), Text(request, "page_token"));
  ASSIGN_OR_RETURN(*message.mutable_filter(), Text(request, "filter"));
  return Call(*jobs_, &v1::JobService::StubInterface::ListJobs, message, request, voucher_);
}

absl::StatusOr<std::string> PageApi::Job(const std::string& job, const PageRequest& request) const {
  v1::GetJobRequest message;
  message.set_name("jobs/" + job);
  return Call(*jobs_, &v1::JobService::StubInterface::GetJob, message, request, voucher_);
}

absl::StatusOr<std::string> PageApi::History(const std::string& job,
                                             const PageRequest& request) const {
  v1::GetJobHistoryRequest message;
  message.set_name("jobs/" + job);
  ASSIGN_OR_RETURN(const int64_t points, Number(request, "points", 0, 0, kAnyInt32));
  message.set_points(static_cast<uint32_t>(points));
  ASSIGN_OR_RETURN(const int64_t details, Number(request, "detail_points", 0, 0, kAnyInt32));
  message.set_detail_points(static_cast<uint32_t>(details));
  return Call(*jobs_, &v1::JobService::StubInterface::GetJobHistory, message, request, voucher_);
}

absl::StatusOr<std::string> PageApi::Logs(const std::string& job,
                                          const PageRequest& request) const {
  v1::TailLogsRequest message;
  message.set_job("jobs/" + job);
  ASSIGN_OR_RETURN(const int64_t attempt, Number(request, "attempt", 0, 0, kAnyInt32));
  message.set_attempt(static_cast<uint32_t>(attempt));
  ASSIGN_OR_RETURN(const int64_t rank, Number(request, "rank", -1, -1, kAnyInt32));
  message.set_rank(static_cast<int32_t>(rank));
  ASSIGN_OR_RETURN(const int64_t lines, Number(request, "lines", kDefaultLines, 1, kMaxLines));
  ASSIGN_OR_RETURN(const int64_t after,
                   Number(request, "after", 0, 0, std::numeric_limits<int64_t>::max()));
  message.set_after_offset(static_cast<uint64_t>(after));
  if (after == 0) message.set_last_lines(static_cast<uint32_t>(lines));
  grpc::ClientContext context;
  RETURN_IF_ERROR(Prepare(request, voucher_, &context));
  const auto stream = logs_->TailLogs(&context, message);
  v1::TailLogsResponse all, part;
  bool enough = false;
  while (!enough && stream->Read(&part)) {
    all.set_dropped(all.dropped() + part.dropped());
    for (v1::LogLine& line : *part.mutable_lines()) {
      if (all.lines_size() < lines) *all.add_lines() = std::move(line);
    }
    enough = all.lines_size() >= lines;
  }
  if (enough) context.TryCancel();
  const grpc::Status ended = stream->Finish();
  if (!enough) RETURN_IF_ERROR(FromGrpc(ended));
  return Json(all);
}

absl::StatusOr<std::string> PageApi::Nodes(const PageRequest& request) const {
  v1::ListNodesRequest message;
  ASSIGN_OR_RETURN(const int64_t size, Number(request, "page_size", 0, 0, kAnyInt32));
  message.set_page_size(static_cast<int32_t>(size));
  ASSIGN_OR_RETURN(*message.mutable_page_token(), Text(request, "page_token"));
  return Call(*nodes_, &v1::NodeService::StubInterface::ListNodes, message, request, voucher_);
}

}  // namespace ringleader::page
