// ringctl: the command line of Ringleader. `ringctl --help` lists its verbs.
#include <unistd.h>

#include <cstdlib>
#include <iostream>

#include "cli/app.h"

int main(int argc, char** argv) {
  using ringleader::cli::Context;
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  return ringleader::cli::RunRingctl(
      arguments, Context{.out = std::cout,
                         .err = std::cerr,
                         .is_terminal = isatty(STDOUT_FILENO) == 1,
                         .environment = [](const char* name) -> std::optional<std::string> {
                           const char* value = std::getenv(name);
                           if (value == nullptr || *value == '\0') return std::nullopt;
                           return value;
                         }});
}
