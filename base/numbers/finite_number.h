// A check that numbers on the command line are numbers: CLI11's ranges let NaN pass, for it is
// neither below nor above them.
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <string>

namespace ringleader {

// Goes with a check of the range, and adds nothing to the help text.
inline CLI::Validator FiniteNumber() {
  return CLI::Validator(
      [](std::string& text) {
        double value = 0;
        const bool fits = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
        return fits ? std::string() : "'" + text + "' is not allowed; give a finite number";
      },
      "");
}

}  // namespace ringleader
