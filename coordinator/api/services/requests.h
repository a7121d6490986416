// How requests are recognised when they come again.
#pragma once

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <string>

#include "absl/status/statusor.h"
#include "coordinator/access/audit_log.h"
#include "coordinator/api/calls/unary.h"
#include "coordinator/api/services/listing.h"
#include "coordinator/store/store.h"

namespace ringleader::api {

inline constexpr size_t kMaxRequestIdBytes = 128;

// INVALID_ARGUMENT when the id is too long or not printable ASCII.
absl::Status ValidateRequestId(const std::string& id);

// What tells a mutating request: its request_id, a fingerprint of what it asks for and who asks, so
// that nobody gets the reply to somebody else's, and its line in the audit log.
template <typename Request>
absl::StatusOr<store::RequestKey> KeyOf(const Change& change, const Request& request) {
  if (absl::Status valid = ValidateRequestId(request.request_id()); !valid.ok()) return valid;
  Request arguments = request;
  arguments.clear_request_id();
  // Deterministic: maps in the same order every time.
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    arguments.SerializeToCodedStream(&coded);
  }
  if (!change.caller.local) {
    bytes.append({'\0', static_cast<char>(change.caller.role)}).append(change.caller.name);
    if (!change.caller.project.empty()) bytes.append({'\0'}).append(change.caller.project);
  }
  v1::AuditRecord record = change.record;
  record.set_outcome(access::OutcomeText(absl::StatusCode::kOk));
  return store::RequestKey{.id = request.request_id(),
                           .method = change.method,
                           .fingerprint = Fingerprint(bytes),
                           .audit = std::move(record)};
}

}  // namespace ringleader::api
