#include "jobspec/text.h"

#include <google/protobuf/stubs/common.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace ringleader::jobspec {

bool IsUtf8(std::string_view text) {
  return google::protobuf::internal::IsStructurallyValidUTF8(text.data(),
                                                             static_cast<int>(text.size()));
}

bool HasControls(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x20 || byte == 0x7f) return true;
    if (byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0) {
      return true;
    }
  }
  return false;
}

std::string Printable(std::string_view text) {
  constexpr size_t kShown = 120;
  const bool cut = text.size() > kShown;
  return absl::StrCat(absl::CHexEscape(absl::string_view(text.data(), cut ? kShown : text.size())),
                      cut ? "…" : "");
}

}  // namespace ringleader::jobspec
