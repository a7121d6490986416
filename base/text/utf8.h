// Text that is cut to a length.
#pragma once

#include <cstddef>
#include <string_view>

namespace ringleader {

// Of a byte that goes on with a character of UTF-8.
constexpr bool IsContinuation(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
}

// The first `most` bytes of `text`, or a few fewer, so that no character of UTF-8 is cut in two: a
// protocol buffer's string would be refused for it.
constexpr std::string_view WholeCharacters(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  size_t end = most;
  while (end > 0 && most - end < 3 && IsContinuation(text[end])) --end;
  return text.substr(0, IsContinuation(text[end]) ? most : end);  // else it is no UTF-8
}

}  // namespace ringleader
