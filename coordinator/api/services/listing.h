// What list methods share: page sizes, page tokens and the filter's little language.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/store/store.h"

namespace ringleader::api {

inline constexpr int kDefaultPageSize = 50;
inline constexpr int kMaxPageSize = 1000;

// 0 becomes the default; what is too large becomes the maximum; INVALID_ARGUMENT when negative.
absl::StatusOr<int> PageSize(int32_t requested);

// A token holds a place in a list and the arguments that the list was made with (method and
// filter), which must be the same on every page: INVALID_ARGUMENT otherwise, and for anything that
// is no token. An empty token is place "".
std::string MakePageToken(std::string_view place, std::string_view arguments);
absl::StatusOr<std::string> ParsePageToken(std::string_view token, std::string_view arguments);

// "state=RUNNING AND labels.team!=ocean AND labels.urgent:*"; values with other characters than
// letters, digits and
// "-_./" stand in double quotes. Empty: no terms. INVALID_ARGUMENT says where and what was
// expected.
absl::StatusOr<std::vector<store::JobTerm>> ParseJobFilter(std::string_view filter);

// Hex SHA-256: of a request to recognise it again, of arguments.
std::string Fingerprint(std::string_view bytes);

}  // namespace ringleader::api
