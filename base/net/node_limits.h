// What both ends agree on of how large a node may be.
#pragma once

#include <cstdint>

namespace ringleader {

// The trainers that a node takes, and those that it may say to run.
inline constexpr uint32_t kMaxTrainersOfANode = 4096;

}  // namespace ringleader
