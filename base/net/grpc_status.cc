#include "base/net/grpc_status.h"

#include <spdlog/spdlog.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace ringleader {
namespace {

struct Row {
  absl::StatusCode from;
  grpc::StatusCode to;
  const char* reason;
};

// Clients decide by code: UNAVAILABLE and ABORTED invite the same request again (with the same
// request_id), the others do not.
constexpr Row kTable[] = {
    {absl::StatusCode::kCancelled, grpc::StatusCode::CANCELLED, "CANCELLED"},
    {absl::StatusCode::kInvalidArgument, grpc::StatusCode::INVALID_ARGUMENT, "INVALID_ARGUMENT"},
    {absl::StatusCode::kDeadlineExceeded, grpc::StatusCode::DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"},
    {absl::StatusCode::kNotFound, grpc::StatusCode::NOT_FOUND, "RESOURCE_NOT_FOUND"},
    {absl::StatusCode::kAlreadyExists, grpc::StatusCode::ALREADY_EXISTS, "RESOURCE_EXISTS"},
    {absl::StatusCode::kPermissionDenied, grpc::StatusCode::PERMISSION_DENIED, "PERMISSION_DENIED"},
    {absl::StatusCode::kUnauthenticated, grpc::StatusCode::UNAUTHENTICATED, "UNAUTHENTICATED"},
    {absl::StatusCode::kResourceExhausted, grpc::StatusCode::RESOURCE_EXHAUSTED,
     "RESOURCE_EXHAUSTED"},
    {absl::StatusCode::kFailedPrecondition, grpc::StatusCode::FAILED_PRECONDITION, "STATE_FORBIDS"},
    {absl::StatusCode::kAborted, grpc::StatusCode::ABORTED, "CONFLICT"},
    {absl::StatusCode::kOutOfRange, grpc::StatusCode::OUT_OF_RANGE, "OUT_OF_RANGE"},
    {absl::StatusCode::kUnimplemented, grpc::StatusCode::UNIMPLEMENTED, "UNIMPLEMENTED"},
    {absl::StatusCode::kUnavailable, grpc::StatusCode::UNAVAILABLE, "UNAVAILABLE"},
    {absl::StatusCode::kDataLoss, grpc::StatusCode::DATA_LOSS, "DATA_LOSS"},
    {absl::StatusCode::kInternal, grpc::StatusCode::INTERNAL, "INTERNAL"},
    {absl::StatusCode::kUnknown, grpc::StatusCode::INTERNAL, "INTERNAL"},
};

Row RowOf(absl::StatusCode code) {
  for (const Row& row : kTable) {
    if (row.from == code) return row;
  }
  return {code, grpc::StatusCode::INTERNAL, "INTERNAL"};
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const Row row = RowOf(status.code());
  const std::string message(status.message().data(), status.message().size());
  if (row.to == grpc::StatusCode::INTERNAL) spdlog::error("internal error: {}", message);

  google::rpc::ErrorInfo info;
  info.set_reason(row.reason);
  info.set_domain(std::string(kErrorDomain));
  google::rpc::Status details;
  details.set_code(row.to);
  details.set_message(message);
  details.add_details()->PackFrom(info);
  return grpc::Status(row.to, message, details.SerializeAsString());
}

}  // namespace ringleader
