#include "base/text/controls.h"

#include "absl/strings/str_cat.h"

namespace ringleader {
namespace {

// Bytes of the control character at the front, 0 if there is none. Those of Unicode's second block
// have two.
size_t ControlBytes(std::string_view text) {
  const auto byte = static_cast<unsigned char>(text[0]);
  if (byte < 0x20 || byte == 0x7f) return 1;
  return byte == 0xc2 && text.size() > 1 && static_cast<unsigned char>(text[1]) < 0xa0 ? 2 : 0;
}

}  // namespace

bool HasControls(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (ControlBytes(text.substr(i)) > 0) return true;
  }
  return false;
}

std::string EscapeControls(std::string_view text, std::string_view keep) {
  std::string escaped;
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t bytes = ControlBytes(text.substr(i));
    if (bytes == 0 || keep.find(text[i]) != std::string_view::npos) {
      escaped.push_back(text[i]);
      continue;
    }
    i += bytes - 1;  // the last byte of either kind is the character's number
    absl::StrAppend(&escaped, "\\x",
                    absl::Hex(static_cast<unsigned char>(text[i]), absl::kZeroPad2));
  }
  return escaped;
}

}  // namespace ringleader
