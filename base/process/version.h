// The version that programs print and tell each other.
#pragma once

#include <string_view>

namespace ringleader {

inline constexpr std::string_view kVersion = "0.1.0";

}  // namespace ringleader
