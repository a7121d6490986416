// Text of unknown origin.
#pragma once

#include <string>
#include <string_view>

namespace ringleader::jobspec {

// Well-formed UTF-8: protobuf carries nothing else in its strings.
bool IsUtf8(std::string_view text);

// One line, at most 120 bytes, control characters escaped: safe to show in an error.
std::string Printable(std::string_view text);

}  // namespace ringleader::jobspec
