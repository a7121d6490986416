// Which version of the protocol between coordinator, worker and trainer this program speaks, and
// the check by which they refuse each other. proto/ringleader/v1/worker_control.proto says when to
// raise it.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace ringleader {

inline constexpr uint32_t kProtocolVersion = 7;

// OK if `peer` ("the worker of nodes/a") speaks the version of this program ("this coordinator").
// FAILED_PRECONDITION names both versions, who is older, and what to install; a peer that sends
// none, which reads as 0, is older than all.
absl::Status CheckProtocolVersion(std::string_view peer, uint32_t peer_version,
                                  std::string_view self);

}  // namespace ringleader
