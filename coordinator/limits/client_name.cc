#include "coordinator/limits/client_name.h"

#include <arpa/inet.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace ringleader::limits {
namespace {

// Of "ipv6:%5B2001:db8::7%5D" the network, in which one machine has as many addresses as it likes.
std::string NetworkOf(std::string_view peer) {
  const std::string address = absl::StrReplaceAll(std::string(peer.substr(peer.find(':') + 1)),
                                                  {{"%5B", ""}, {"%5D", ""}, {"[", ""}, {"]", ""}});
  in6_addr bytes = {};
  if (inet_pton(AF_INET6, address.c_str(), &bytes) != 1) return std::string(peer);
  char text[INET6_ADDRSTRLEN] = {};
  if (IN6_IS_ADDR_V4MAPPED(&bytes)) {
    inet_ntop(AF_INET, bytes.s6_addr + 12, text, sizeof(text));
    return absl::StrCat("ipv4:", text);
  }
  std::memset(bytes.s6_addr + 8, 0, 8);
  inet_ntop(AF_INET6, &bytes, text, sizeof(text));
  return absl::StrCat("ipv6:", text, "/64");
}

}  // namespace

std::string ClientOf(const access::Caller& caller, std::string_view peer) {
  if (!caller.local && !caller.name.empty()) {
    return absl::StrCat(std::string(access::RoleText(caller.role)), " ", caller.project,
                        caller.project.empty() ? "" : "/", caller.name);
  }
  const bool has_port = peer.substr(0, 2) == "ip";  // ipv4:, ipv6:
  const std::string_view address = peer.substr(0, has_port ? peer.rfind(':') : peer.find(':') + 1);
  return peer.substr(0, 5) == "ipv6:" ? NetworkOf(address) : std::string(address);
}

}  // namespace ringleader::limits
