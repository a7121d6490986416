// Child processes that cannot outlive this one.
#pragma once

#include <sys/types.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/agent/node/run_as.h"

namespace ringleader::agent {

struct ProcessOptions {
  std::vector<std::string> command;                     // command[0]: path of the binary
  std::string directory;                                // to run in
  std::map<std::string, std::string> environment = {};  // on top of this process's own
  // Stay open in the child, e.g. a lock that is to be held as long as the child lives.
  std::vector<int> inherited_fds = {};
  // Whose process it is, with that user's group alone, and without any way to gain rights; none:
  // this process's own user.
  std::optional<LocalUser> user = {};
};

struct ExitStatus {
  int code = 0;
  int signal = 0;  // not 0: killed by it
};

// A running child. Move-only; not thread-safe.
class Process {
 public:
  // Starts the child as leader of its own process group. The kernel kills it (SIGKILL) when the
  // calling *thread* ends: call this from one that lives as long as the process does.
  static absl::StatusOr<Process> Start(const ProcessOptions& options);

  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  ~Process();  // kills what still runs, and waits for it

  pid_t pid() const { return pid_; }
  // Read ends of the child's output, non-blocking. The caller takes them over, once.
  int TakeStdout();
  int TakeStderr();

  // Signals the whole process group; nothing happens if it is gone.
  void Signal(int signal);
  // The child's end if it has come; does not block. The rest of its group is killed then.
  std::optional<ExitStatus> Poll();

 private:
  Process() = default;

  pid_t pid_ = -1;  // -1: reaped
  int stdout_ = -1;
  int stderr_ = -1;
};

}  // namespace ringleader::agent
