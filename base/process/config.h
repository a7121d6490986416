// Configuration files, and flags of a program, each of which may also stand in such a file
// (--config FILE).
#pragma once

#include <cstddef>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace CLI {
class App;
}

namespace ringleader {

// A line of a configuration file: "name: value", "name: [value, …]", or "name:" without a value.
struct ConfigLine {
  std::string name;
  std::vector<std::string> values;
};

inline constexpr size_t kMaxConfigFileBytes = size_t{1} << 20;

// All lines of a file, which is YAML. INVALID_ARGUMENT says what is wrong with it.
absl::StatusOr<std::vector<ConfigLine>> ReadConfig(std::istream& input);

// Returns the exit code when the program is to end now: 0 after --help or --version, 64 (EX_USAGE)
// after a mistake, which it has written to standard error.
std::optional<int> ParseArguments(CLI::App& app, int argc, char** argv);

// The same with --config and --version, which it adds to `app`. The command line wins over the
// file; a name in the file that is no flag is a mistake, and so is what is no regular file of at
// most kMaxConfigFileBytes.
std::optional<int> ParseFlags(CLI::App& app, int argc, char** argv);

// What the program runs with, after defaults, file and command line, as YAML that --config takes.
std::string ResolvedConfig(const CLI::App& app);

}  // namespace ringleader
