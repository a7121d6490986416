// ringctl: the command line of Ringleader. `ringctl --help` lists its verbs.
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>

#include "base/process/signals.h"
#include "base/standard_streams.h"
#include "cli/app.h"

namespace {

// What a terminal has that does not say.
constexpr int kUsualColumns = 80;

int TerminalColumns() {
  winsize size{};
  const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kUsualColumns;
}

}  // namespace

int main(int argc, char** argv) {
  using ringleader::cli::Context;
  ringleader::TakeStandardStreams();
  ringleader::FailTooLargeWrites();
  // gRPC's own log lines say again, for its developers, what errors say.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  return ringleader::cli::RunRingctl(
      arguments, Context{.out = std::cout,
                         .err = std::cerr,
                         .terminal_columns =
                             isatty(STDOUT_FILENO) == 1 ? TerminalColumns : std::function<int()>(),
                         .environment = [](const char* name) -> std::optional<std::string> {
                           const char* value = std::getenv(name);
                           if (value == nullptr || *value == '\0') return std::nullopt;
                           return value;
                         }});
}
