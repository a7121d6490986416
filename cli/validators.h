// Checks of what the command line says. Numbers have limits that people can read: CLI11's own print
// all 300 digits of the largest double.
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "jobspec/fields/text.h"

namespace ringleader::cli {

inline CLI::Validator NumberThat(const char* description, bool (*fits)(double)) {
  return CLI::Validator(
      [description, fits](std::string& text) {
        double value = 0;
        if (absl::SimpleAtod(text, &value) && std::isfinite(value) && fits(value)) {
          return std::string();
        }
        return absl::StrCat("'", jobspec::Printable(text), "' is not allowed; give a number ",
                            description);
      },
      description);
}

inline CLI::Validator MoreThanZero() {
  return NumberThat("more than 0", [](double value) { return value > 0; });
}
inline CLI::Validator ZeroOrMore() {
  return NumberThat("of 0 or more", [](double value) { return value >= 0; });
}

// Of a script's variable that is not set, which would else be as no flag at all.
inline CLI::Validator NamesAFile() {
  return CLI::Validator(
      [](std::string& text) {
        return text.empty() ? "the name is empty; name a file, or leave the flag out" : "";
      },
      "");
}

}  // namespace ringleader::cli
