// Flags of a program, each of which may also stand in a YAML file (--config FILE, "flag: value" a
// line).
#pragma once

#include <optional>
#include <string>

namespace CLI {
class App;
}

namespace ringleader {

// Adds --config and --version to `app`, parses, and checks. Returns the exit code when the program
// is to end now: after
// --help or --version, or after a mistake, of which standard error then says what it is. The
// command line wins over the file; a key that is no flag is a mistake.
std::optional<int> ParseFlags(CLI::App& app, int argc, char** argv);

// What the program runs with, after defaults, file and command line, as YAML that --config takes.
std::string ResolvedConfig(const CLI::App& app);

}  // namespace ringleader
