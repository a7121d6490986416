// Set-up of the process's log: lines on standard error, stamped in UTC, by spdlog. Programs call it
// once, first thing in main(); everything else just uses spdlog::info() and its kin.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace ringleader {

struct LoggingOptions {
  std::string level = "info";
  // A message is one line: what others wrote cannot pass for a line of its own. A program that logs
  // nobody else's text may log more than a line at once.
  bool one_line = true;
};

// --log-level
void AddLoggingFlags(CLI::App& app, LoggingOptions* options);

// `program` stands in every line.
void SetUpLogging(const std::string& program, const LoggingOptions& options);

}  // namespace ringleader
