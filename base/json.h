// JSON that somebody else wrote.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace ringleader {

// More than what configurations, manifests and headers nest. What nests a hundred thousand deep
// overflows the stack of whoever copies, compares or prints it.
inline constexpr int kMaxJsonDepth = 32;

// Discarded (is_discarded()) where `text` is not JSON, or nests deeper than kMaxJsonDepth. `watch`:
// nlohmann's callback for what is parsed, e.g. keys that come twice.
nlohmann::json ParseJson(std::string_view text,
                         const nlohmann::json::parser_callback_t& watch = nullptr);

}  // namespace ringleader
