// How large messages between programs may be, at both ends.
#pragma once

#include <cstddef>

namespace ringleader {

// One gRPC message of the coordinator to a worker. A job's specification and its plan go together
// in one command and fit many times.
inline constexpr int kMaxMessageBytes = 16 << 20;
// One to the coordinator, a client's request or a worker's event. Parsed it might take thirty times
// as much: it is looked at before, and refused where it would take more than this in memory.
inline constexpr int kMaxRequestBytes = 4 << 20;
inline constexpr size_t kMaxParsedRequestBytes = size_t{32} << 20;
// A request that brings no job file, on the wire and in memory. The longest filter has 4 KiB.
inline constexpr size_t kMaxPlainRequestBytes = size_t{16} << 10;
// The layers of one step report, which are what makes an event large.
inline constexpr size_t kMaxLayerBytes = size_t{2} << 20;
// What a trainer says of its end.
inline constexpr size_t kMaxExitMessageBytes = 4096;

// A job's specification, and an attempt's plan, as they are stored and sent.
inline constexpr size_t kMaxSpecBytes = size_t{1} << 20;
inline constexpr size_t kMaxPlanBytes = size_t{1} << 20;

}  // namespace ringleader
