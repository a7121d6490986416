// ringctl bench: what this machine does, by a program of its own that ringctl becomes.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>
#include <vector>

#include "absl/strings/str_format.h"
#include "cli/commands/commands.h"

namespace ringleader::cli {
namespace {

// Returns only where the program cannot be started.
absl::StatusOr<int> Become(std::string program, std::vector<std::string> arguments) {
  if (program.empty()) {
    std::error_code error;
    program =
        std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "ringleader-bench";
  }
  std::vector<char*> raw = {program.data()};
  for (std::string& argument : arguments) raw.push_back(argument.data());
  raw.push_back(nullptr);
  execv(program.c_str(), raw.data());
  return absl::NotFoundError(
      absl::StrFormat("cannot start %s: %s; it comes with the package ringleader-worker (target "
                      "ringleader-bench), or give --program",
                      program, std::strerror(errno)));
}

}  // namespace

void AddBenchCommand(CLI::App& app, Context* context) {
  CLI::App* bench = app.add_subcommand("bench", "measure this machine");
  bench->require_subcommand(1);
  CLI::App* attention = bench->add_subcommand("attention",
                                              "masks x kernels, choices and schemes on CPUs or "
                                              "GPUs, each cell checked (--help: what it takes)");
  auto program = std::make_shared<std::string>();
  attention->add_option("--program", *program,
                        "path of ringleader-bench; the one beside ringctl unless set");
  attention->set_help_flag();
  attention->fallthrough(false);
  attention->prefix_command();  // what follows is the program's
  attention->callback(
      [=] { context->action = [=] { return Become(*program, attention->remaining()); }; });
}

}  // namespace ringleader::cli
