#include "coordinator/limits/client_name.h"

#include "absl/strings/str_cat.h"

namespace ringleader::limits {

std::string ClientOf(const access::Caller& caller, std::string_view peer) {
  if (!caller.local && !caller.name.empty()) {
    return absl::StrCat(std::string(access::RoleText(caller.role)), " ", caller.project,
                        caller.project.empty() ? "" : "/", caller.name);
  }
  const bool has_port = peer.substr(0, 2) == "ip";  // ipv4:, ipv6:
  const size_t end = has_port ? peer.rfind(':') : peer.find(':') + 1;
  return std::string(peer.substr(0, end));
}

}  // namespace ringleader::limits
