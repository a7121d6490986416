// Checks of numbers on the command line: CLI11's ranges let NaN pass, for it is neither below nor
// above them. They add nothing to the help text.
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <string>

namespace ringleader {

// Goes with a check of the range.
inline CLI::Validator FiniteNumber() {
  return CLI::Validator(
      [](std::string& text) {
        double value = 0;
        const bool fits = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
        return fits ? std::string() : "'" + text + "' is not allowed; give a finite number";
      },
      "");
}

// Of time-outs and intervals: what waits for less than a millisecond has no time for anything else,
// and what waits for more than thirty years never ends.
inline CLI::Validator UsableSeconds() {
  return CLI::Validator(
      [](std::string& text) {
        double value = 0;
        if (std::string wrong = FiniteNumber()(text); !wrong.empty()) return wrong;
        CLI::detail::lexical_cast(text, value);
        if (value >= 1e-3 && value <= 1e9) return std::string();
        return "'" + text + "' is not allowed; give seconds from 0.001 to 1000000000";
      },
      "");
}

}  // namespace ringleader
