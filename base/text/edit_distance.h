// What somebody may have meant to type.
#pragma once

#include <cstddef>
#include <string_view>

namespace ringleader {

// Bytes to insert, delete or replace to make one of the other.
size_t EditDistance(std::string_view a, std::string_view b);

}  // namespace ringleader
