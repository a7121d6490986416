// Control characters in text of unknown origin: terminals obey them, and they end a log's line.
#pragma once

#include <string>
#include <string_view>

namespace ringleader {

// Holds control characters: also those of Unicode's second block, U+0080 to U+009F, which terminals
// obey, too.
bool HasControls(std::string_view text);

// Its control characters as "\x1b" and the like, and all else as it is: safe to show on a terminal
// that reads UTF-8. `keep`: control characters that stay, e.g. "\n".
std::string EscapeControls(std::string_view text, std::string_view keep = "");

}  // namespace ringleader
