// How requests are recognised when they come again.
#pragma once

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <string>

#include "absl/status/statusor.h"
#include "coordinator/api/services/listing.h"
#include "coordinator/store/store.h"

namespace ringleader::api {

inline constexpr size_t kMaxRequestIdBytes = 128;

// INVALID_ARGUMENT when the id is too long or not printable ASCII.
absl::Status ValidateRequestId(const std::string& id);

// Of a mutating request: its request_id, and a fingerprint of all that it asks for.
template <typename Request>
absl::StatusOr<store::RequestKey> KeyOf(const std::string& method, const Request& request) {
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
  return store::RequestKey{
      .id = request.request_id(), .method = method, .fingerprint = Fingerprint(bytes)};
}

}  // namespace ringleader::api
