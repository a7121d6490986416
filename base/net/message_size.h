// How large messages between programs may be, at both ends.
#pragma once

#include <cstddef>

namespace ringleader {

// One gRPC message between coordinator, worker and ringctl. A job's specification and its plan go
// together in one command and fit many times, and so do a worker's events.
inline constexpr int kMaxMessageBytes = 16 << 20;

// A job's specification, and an attempt's plan, as they are stored and sent.
inline constexpr size_t kMaxSpecBytes = size_t{1} << 20;
inline constexpr size_t kMaxPlanBytes = size_t{1} << 20;

}  // namespace ringleader
