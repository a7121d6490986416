// What the kernel benches share: timing on the device, and a table on stdout that is also a CSV
// file.
#pragma once

#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ringleader::kernels::bench {

// The median of `repeats` timed runs in milliseconds, after warming up. `run` enqueues on the
// default stream.
double MedianMs(const std::function<void()>& run, int repeats = 20);

// Ends the program with the message of a status that is not OK.
void Check(const absl::Status& status);

// [--csv FILE] [--commit NAME]; other arguments are ignored.
struct Flags {
  std::string csv;                 // empty: no file
  std::string commit = "unknown";  // names what was measured
};
Flags ParseFlags(int argc, char** argv);

// Rows of text on stdout and, prefixed with date, commit and hardware, in a CSV file. Each is
// written as it comes: a run that is cut off keeps what it has measured.
class Report {
 public:
  // Columns exclude the three that are added. A file that cannot be written ends the program with a
  // message.
  Report(const Flags& flags, std::vector<std::string> columns);

  void Add(const std::vector<std::string>& row);

 private:
  void WriteLine(const std::string& prefix, const std::vector<std::string>& row);

  std::string csv_, prefix_;
  std::vector<std::string> columns_;
  std::ofstream file_;
};

}  // namespace ringleader::kernels::bench
