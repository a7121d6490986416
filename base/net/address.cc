#include "base/net/address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"

namespace ringleader {
namespace {

constexpr std::string_view kUnixPrefix = "unix:";

absl::Status BadAddress(std::string_view text, std::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrFormat("address \"%s\": %s; write host:port, [ipv6]:port or unix:/path",
                      std::string(text), std::string(what)));
}

}  // namespace

absl::StatusOr<Address> ParseAddress(std::string_view text) {
  Address address;
  if (text.substr(0, kUnixPrefix.size()) == kUnixPrefix) {
    address.path = std::string(text.substr(kUnixPrefix.size()));
    if (address.path.empty()) return BadAddress(text, "the path is missing");
    return address;
  }
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return BadAddress(text, "the port is missing");
  std::string_view host = text.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return BadAddress(text, host.find("//") != std::string_view::npos
                                ? "it is a URL"
                                : "an IPv6 address needs brackets");
  }
  if (host.empty()) return BadAddress(text, "the host is missing");
  address.host = std::string(host);
  if (!absl::SimpleAtoi(std::string(text.substr(colon + 1)), &address.port) || address.port < 0 ||
      address.port > 65535) {
    return BadAddress(text, "the port must be a number from 0 to 65535");
  }
  return address;
}

std::string FormatAddress(const Address& address) {
  if (!address.path.empty()) return std::string(kUnixPrefix) + address.path;
  const bool ipv6 = address.host.find(':') != std::string::npos;
  return ipv6 ? absl::StrFormat("[%s]:%d", address.host, address.port)
              : absl::StrFormat("%s:%d", address.host, address.port);
}

bool IsLoopback(const Address& address) {
  if (!address.path.empty() || address.host == "localhost") return true;
  in_addr v4;
  if (inet_pton(AF_INET, address.host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  return inet_pton(AF_INET6, address.host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

absl::Status CheckCanListen(const Address& address) {
  if (!address.path.empty()) return absl::OkStatus();
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const std::string port = absl::StrFormat("%d", address.port);
  if (const int error = getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found);
      error != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("cannot listen on %s: %s; use an address of this machine",
                        FormatAddress(address), gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return absl::InternalError(absl::StrFormat("socket: %s", std::strerror(errno)));
  // The servers set this option, too: connections in TIME_WAIT then do not count.
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  // Binding alone succeeds beside a listener that set the same option: only listening tells.
  const bool free = bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, 1) == 0;
  const int error = errno;
  close(fd);
  if (free) return absl::OkStatus();
  if (error == EADDRINUSE) {
    return absl::AlreadyExistsError(absl::StrFormat(
        "cannot listen on %s: port %d is in use by another program; stop it or choose another port",
        FormatAddress(address), address.port));
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("cannot listen on %s: %s; use an address of this machine",
                      FormatAddress(address), std::strerror(error)));
}

}  // namespace ringleader
