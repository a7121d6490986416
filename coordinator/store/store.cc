#include "coordinator/store/store.h"

#include "absl/strings/str_format.h"

namespace ringleader::store {
namespace {

// Ids are what JobSpec.name and worker names allow; checked here so that nothing else reaches a
// query or a message.
absl::StatusOr<std::string> IdFromName(std::string_view name, std::string_view collection) {
  const bool prefixed =
      name.size() > collection.size() && name.substr(0, collection.size()) == collection;
  const std::string_view id = prefixed ? name.substr(collection.size()) : std::string_view();
  bool valid = !id.empty() && id.size() <= 253;
  for (const char c : id) {
    valid = valid && ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      c == '-' || c == '.' || c == '_');
  }
  if (!valid) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "name: must have the form \"%sID\" with ID of letters, digits, '-', '.' and '_'",
        std::string(collection)));
  }
  return std::string(id);
}

}  // namespace

absl::StatusOr<std::string> JobIdFromName(std::string_view name) {
  return IdFromName(name, "jobs/");
}
absl::StatusOr<std::string> NodeIdFromName(std::string_view name) {
  return IdFromName(name, "nodes/");
}

absl::Status JobNotFound(std::string_view id) {
  return absl::NotFoundError(absl::StrFormat("jobs/%s does not exist", std::string(id)));
}

}  // namespace ringleader::store
