#include "jobspec/text.h"

#include <cstdint>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace ringleader::jobspec {

bool IsUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<uint8_t>(text[i]);
    const int length = lead < 0x80         ? 1
                       : (lead >> 5) == 6  ? 2
                       : (lead >> 4) == 14 ? 3
                       : (lead >> 3) == 30 ? 4
                                           : 0;
    if (length == 0 || i + length > text.size()) return false;
    uint32_t point = length == 1 ? lead : lead & (0xff >> (length + 1));
    for (int k = 1; k < length; ++k) {
      const auto next = static_cast<uint8_t>(text[i + k]);
      if ((next >> 6) != 2) return false;
      point = point << 6 | (next & 0x3f);
    }
    // No overlong forms, surrogates, or code points past the end of Unicode.
    constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
    if (point < kSmallest[length] || point > 0x10ffff) return false;
    if (point >= 0xd800 && point < 0xe000) return false;
    i += length;
  }
  return true;
}

std::string Printable(std::string_view text) {
  constexpr size_t kShown = 120;
  const bool cut = text.size() > kShown;
  return absl::StrCat(absl::CHexEscape(absl::string_view(text.data(), cut ? kShown : text.size())),
                      cut ? "…" : "");
}

}  // namespace ringleader::jobspec
