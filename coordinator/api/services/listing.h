// What list methods share: page sizes, page tokens and the filter's little language.
#pragma once

#include <google/protobuf/repeated_field.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
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

// Fills `entries` of a reply from `all`, which is sorted by name: those that follow `after`, as
// many as the page may hold, at least one. Returns whether there are more. A page that begins after
// a name misses nothing and repeats nothing while entries come and go. Entry: a message with a
// name.
template <typename Entry>
bool FillPage(std::vector<Entry> all, std::string_view after, int page_size,
              google::protobuf::RepeatedPtrField<Entry>* entries) {
  size_t bytes = 0;
  for (Entry& entry : all) {
    if (entry.name() <= after) continue;
    bytes += entry.ByteSizeLong();
    if (!entries->empty() && (entries->size() == page_size || bytes > store::kPageBytes)) {
      return true;
    }
    *entries->Add() = std::move(entry);
  }
  return false;
}

// What a term of a filter begins with that asks for a label.
inline constexpr std::string_view kLabelPrefix = "labels.";

// At most eight terms: "state=RUNNING AND labels.team!=ocean AND labels.urgent:*"; values with
// other characters than letters, digits and
// "-_./" stand in double quotes. Empty: no terms. INVALID_ARGUMENT says where and what was
// expected.
absl::StatusOr<std::vector<store::JobTerm>> ParseJobFilter(std::string_view filter);

// Hex SHA-256: of a request to recognise it again, of arguments.
std::string Fingerprint(std::string_view bytes);

}  // namespace ringleader::api
