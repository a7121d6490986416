#include "jobspec/fields/text.h"

#include <google/protobuf/stubs/common.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace ringleader::jobspec {

bool IsUtf8(std::string_view text) {
  return google::protobuf::internal::IsStructurallyValidUTF8(text.data(),
                                                             static_cast<int>(text.size()));
}

std::string Shortened(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return std::string(text);
  size_t end = max_bytes - std::string_view("…").size();
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return std::string(text.substr(0, end)).append("…");
}

std::string Printable(std::string_view text) {
  constexpr size_t kShown = 120;
  const bool cut = text.size() > kShown;
  return absl::StrCat(absl::CHexEscape(absl::string_view(text.data(), cut ? kShown : text.size())),
                      cut ? "…" : "");
}

}  // namespace ringleader::jobspec
