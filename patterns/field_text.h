// Text of job file fields into options.
#pragma once

#include <charconv>
#include <string_view>
#include <system_error>

namespace ringleader::patterns {

// False unless all of `text` is a number that T holds.
template <typename T>
bool ReadNumber(std::string_view text, T* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace ringleader::patterns
