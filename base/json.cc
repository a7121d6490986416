#include "base/json.h"

namespace ringleader {

using Json = nlohmann::json;

Json ParseJson(std::string_view text, const Json::parser_callback_t& watch) {
  bool is_deep = false;
  const auto watch_depth = [&](int depth, Json::parse_event_t event, Json& parsed) {
    const bool begins =
        event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start;
    if (depth + (begins ? 1 : 0) > kMaxJsonDepth) {
      is_deep = true;
      return false;  // not kept: to let go of it would recurse, too
    }
    return watch == nullptr || watch(depth, event, parsed);
  };
  Json root = Json::parse(text, watch_depth, /*allow_exceptions=*/false);
  return is_deep ? Json(Json::value_t::discarded) : root;
}

}  // namespace ringleader
