// What the kernel benches share: timing on the device, and a table on stdout that is also a CSV
// file.
#pragma once

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
  std::string csv;
  std::string commit = "unknown";
};
Flags ParseFlags(int argc, char** argv);

// Rows of text; each is prefixed with date, commit and hardware in the CSV file.
class Report {
 public:
  // `commit` names what was measured; columns exclude the three that are added.
  Report(std::string commit, std::vector<std::string> columns);

  void Add(std::vector<std::string> row);
  void PrintTable() const;
  // False, with a message on stderr, when the file cannot be written.
  bool WriteCsv(const std::string& path) const;

 private:
  std::string date_, commit_, hardware_;
  std::vector<std::string> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ringleader::kernels::bench
