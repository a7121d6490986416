// Text of unknown origin.
#pragma once

#include <string>
#include <string_view>

namespace ringleader::jobspec {

// Well-formed UTF-8: protobuf carries nothing else in its strings.
bool IsUtf8(std::string_view text);

// Holds control characters: also those of Unicode's second block, U+0080 to U+009F, which terminals
// obey, too.
bool HasControls(std::string_view text);

// One line, at most 120 bytes, control characters escaped: safe to show in an error.
std::string Printable(std::string_view text);

}  // namespace ringleader::jobspec
