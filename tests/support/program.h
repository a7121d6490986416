// A program under test, as a process of its own.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace ringleader::testing {

// The program `name` of the same build.
std::string ProgramPath(const std::string& name);

// Returns a TCP port of 127.0.0.1 that nothing listens on, another one at every call. Nothing
// reserves it: take it soon. It is below those that the system gives to outgoing connections: a
// client that tries to reach a server which is away could be given the server's own.
int FreePort();

// Waits until `condition` holds, looking every 10 ms; false when it does not within `timeout`.
bool Eventually(const std::function<bool()>& condition, absl::Duration timeout = absl::Seconds(60));

class Process {
 public:
  // Starts the program with its standard output and error in the file `log_path`.
  Process(const std::string& program, const std::vector<std::string>& arguments,
          const std::string& log_path);
  // Kills it if it still runs.
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  bool Running();
  void Signal(int signal_number);
  // The exit code, or minus the signal that ended it; nullopt if it still runs after `timeout`.
  std::optional<int> Wait(absl::Duration timeout = absl::Seconds(60));
  void KillHard();  // SIGKILL, and waits

  std::string Log() const;

 private:
  const std::string log_path_;
  pid_t pid_ = -1;
  std::optional<int> exit_;
};

}  // namespace ringleader::testing
