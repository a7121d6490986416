// Addresses that services listen on: "host:port", "[ipv6]:port" or "unix:/path".
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringleader {

struct Address {
  std::string host;  // without brackets; empty for a Unix socket
  int port = 0;      // 0: the system picks one
  std::string path;  // Unix socket
};

// INVALID_ARGUMENT names the text and the form that is expected.
absl::StatusOr<Address> ParseAddress(std::string_view text);
std::string FormatAddress(const Address& address);

// Reachable from this machine only: a Unix socket, 127.0.0.0/8, ::1 or localhost.
bool IsLoopback(const Address& address);

// Why nothing can listen on `address` now, as a status to show to the user ("port 7070 is in use
// …"); OK when it could.
absl::Status CheckCanListen(const Address& address);

}  // namespace ringleader
