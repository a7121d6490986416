// Text of unknown origin: the control characters in it, which terminals obey and which end a log's
// line, and what readers of YAML would not take for text.
#pragma once

#include <string>
#include <string_view>

namespace ringleader {

// Holds control characters: also those of Unicode's second block, U+0080 to U+009F, which terminals
// obey, too, and those that turn the order of what follows them on the screen around.
bool HasControls(std::string_view text);

// Its control characters as "\x1b" or "\u202e", and all else as it is: safe to show on a terminal
// that reads UTF-8. `keep`: control characters that stay, e.g. "\n".
std::string EscapeControls(std::string_view text, std::string_view keep = "");

// Unless it is quoted, some reader of YAML 1.1 or 1.2 takes it for a number, a truth value, a date
// or nothing: "0123", "yes", "12:30", "2026-01-01", "".
bool LooksLikeOtherThanText(std::string_view text);

}  // namespace ringleader
