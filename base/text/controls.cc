#include "base/text/controls.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace ringleader {
namespace {

// The number of the character of three bytes at the front, 0 if there is none such.
unsigned NumberOfThree(std::string_view text) {
  if (text.size() < 3 || (text[0] & 0xf0) != 0xe0) return 0;
  return (text[0] & 0xfu) << 12 | (text[1] & 0x3fu) << 6 | (text[2] & 0x3fu);
}

// Directs in which order terminals show what follows, so that it can read as something else.
bool TurnsOrder(unsigned number) {
  return number == 0x200e || number == 0x200f || (number >= 0x202a && number <= 0x202e) ||
         (number >= 0x2066 && number <= 0x2069);
}

// Bytes of the control character at the front, 0 if there is none. Those of Unicode's second block
// have two.
size_t ControlBytes(std::string_view text) {
  const auto byte = static_cast<unsigned char>(text[0]);
  if (byte < 0x20 || byte == 0x7f) return 1;
  if (TurnsOrder(NumberOfThree(text))) return 3;
  return byte == 0xc2 && text.size() > 1 && static_cast<unsigned char>(text[1]) < 0xa0 ? 2 : 0;
}

bool HasOnly(std::string_view text, std::string_view characters) {
  return !text.empty() && text.find_first_not_of(characters) == std::string_view::npos;
}

// Takes what is of `characters` off the front, and returns how many those were.
size_t TakeOff(std::string_view characters, std::string_view* text) {
  const size_t count = std::min(text->find_first_not_of(characters), text->size());
  text->remove_prefix(count);
  return count;
}

bool TakeOffOne(std::string_view characters, std::string_view* text) {
  if (text->empty() || characters.find(text->front()) == std::string_view::npos) return false;
  text->remove_prefix(1);
  return true;
}

constexpr std::string_view kDigits = "0123456789";

// Of lower-case letters. Readers differ in what they take; this is what any of them does.
bool LooksLikeNumber(std::string_view text) {
  constexpr std::string_view kGrouped = "0123456789_,";  // 1_000; Ruby's reader has 1,000, too
  TakeOffOne("+-", &text);
  if (text == ".inf" || text == ".nan") return true;
  if (text.starts_with("0x")) return HasOnly(text.substr(2), "0123456789abcdef_");
  if (text.starts_with("0o")) return HasOnly(text.substr(2), "01234567_");
  if (text.starts_with("0b")) return HasOnly(text.substr(2), "01_");
  if (text.starts_with('_') || text.starts_with(',')) return false;
  size_t digits = TakeOff(kGrouped, &text);
  // Base 60 of YAML 1.1: 12:30.
  while (digits > 0 && text.size() > 1 && text[0] == ':' && absl::ascii_isdigit(text[1])) {
    text.remove_prefix(1);
    TakeOff(kDigits, &text);
  }
  if (TakeOffOne(".", &text)) digits += TakeOff(kGrouped, &text);
  if (digits == 0 || !TakeOffOne("e", &text)) return digits > 0 && text.empty();
  TakeOffOne("+-", &text);
  return HasOnly(text, kDigits);
}

// 2026-01-01, whatever time of that day follows.
bool LooksLikeDate(std::string_view text) {
  if (TakeOff(kDigits, &text) != 4 || !TakeOffOne("-", &text)) return false;
  if (TakeOff(kDigits, &text) == 0 || !TakeOffOne("-", &text)) return false;
  if (TakeOff(kDigits, &text) == 0) return false;
  return text.empty() || (TakeOffOne("t \t", &text) && TakeOff(" \t0123456789", &text) > 0);
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
    if (bytes == 3) {
      absl::StrAppend(&escaped, "\\u", absl::Hex(NumberOfThree(text.substr(i)), absl::kZeroPad4));
      i += 2;
      continue;
    }
    i += bytes - 1;  // the last byte of either other kind is the character's number
    absl::StrAppend(&escaped, "\\x",
                    absl::Hex(static_cast<unsigned char>(text[i]), absl::kZeroPad2));
  }
  return escaped;
}

bool LooksLikeOtherThanText(std::string_view text) {
  // "=" and "<<" are YAML 1.1's, for a default value and for keys that are merged.
  constexpr std::string_view kWords[] = {"",   "~",   "null", "true", "false", "yes", "no",
                                         "on", "off", "y",    "n",    "=",     "<<"};
  const std::string lower = absl::AsciiStrToLower(absl::string_view(text.data(), text.size()));
  return std::find(std::begin(kWords), std::end(kWords), lower) != std::end(kWords) ||
         LooksLikeNumber(lower) || LooksLikeDate(lower);
}

}  // namespace ringleader
