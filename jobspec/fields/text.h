// Text of unknown origin.
#pragma once

#include <string>
#include <string_view>

namespace ringleader::jobspec {

// Well-formed UTF-8: protobuf carries nothing else in its strings.
bool IsUtf8(std::string_view text);

// The first bytes of a text in UTF-8, with "…" if there are more: in all `max_bytes` at most, which
// is at least 3.
std::string Shortened(std::string_view text, size_t max_bytes);

// One line, at most 120 bytes, control characters escaped: safe to show in an error.
std::string Printable(std::string_view text);

}  // namespace ringleader::jobspec
