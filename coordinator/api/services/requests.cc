#include "coordinator/api/services/requests.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace ringleader::api {

absl::Status ValidateRequestId(const std::string& id) {
  const bool printable =
      std::all_of(id.begin(), id.end(), [](char c) { return c > ' ' && c < 0x7f; });
  if (id.size() > kMaxRequestIdBytes || !printable) {
    return absl::InvalidArgumentError(
        absl::StrFormat("request_id: must be at most %d printable ASCII characters, such as a UUID",
                        kMaxRequestIdBytes));
  }
  return absl::OkStatus();
}

}  // namespace ringleader::api
