// Whose share of the coordinator a call uses up.
#pragma once

#include <string>
#include <string_view>

#include "coordinator/access/caller.h"

namespace ringleader::limits {

// One client: "user ocean/alice", or "user alice", where the caller is known by name; otherwise the
// address that the call comes from, without its port ("ipv4:10.0.0.7", "ipv6:2001:db8::/64",
// "unix:"), because everybody there is one caller. `peer`: as gRPC tells it, e.g.
// "ipv4:10.0.0.7:40112".
std::string ClientOf(const access::Caller& caller, std::string_view peer);

}  // namespace ringleader::limits
