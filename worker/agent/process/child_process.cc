#include "worker/agent/process/child_process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ringleader::agent {
namespace {

// What the child needs between fork and exec, made ready before: there it may not allocate.
struct ChildPlan {
  std::vector<char*> arguments;
  std::vector<char*> environment;
  const char* directory = nullptr;
  int stdout_fd = -1;
  int stderr_fd = -1;
  int error_fd = -1;
  const std::vector<int>* inherited_fds = nullptr;
  const LocalUser* user = nullptr;
  pid_t parent = -1;
};

// The system calls themselves: the C library's functions would have all threads follow suit, and
// the child of a fork has none of those that their lists speak of. The order matters, because who
// is no longer root can change neither groups nor group.
bool BecomeUser(const LocalUser& user) {
  return syscall(SYS_setgroups, 0, nullptr) == 0 &&
         syscall(SYS_setresgid, user.gid, user.gid, user.gid) == 0 &&
         syscall(SYS_setresuid, user.uid, user.uid, user.uid) == 0 &&
         prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0;
}

// Async-signal-safe calls only: other threads may have held locks at the fork.
[[noreturn]] void RunChild(const ChildPlan& plan) {
  setpgid(0, 0);
  bool ok = plan.user == nullptr || BecomeUser(*plan.user);
  // After that: the kernel forgets it where a process changes its user.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != plan.parent) _exit(127);  // it died before the line above
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  const int null = open("/dev/null", O_RDONLY);
  ok = ok && null >= 0 && dup2(null, STDIN_FILENO) >= 0 &&
       dup2(plan.stdout_fd, STDOUT_FILENO) >= 0 && dup2(plan.stderr_fd, STDERR_FILENO) >= 0;
  close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
  for (const int fd : *plan.inherited_fds) ok = ok && fcntl(fd, F_SETFD, 0) == 0;
  ok = ok && chdir(plan.directory) == 0;
  if (ok) execve(plan.arguments[0], plan.arguments.data(), plan.environment.data());
  const int error = errno;
  (void)!write(plan.error_fd, &error, sizeof(error));
  _exit(127);
}

void Close(int* fd) {
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

struct Pipe {
  int read = -1;
  int write = -1;
  Pipe() = default;
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    Close(&read);
    Close(&write);
  }
  bool Open() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return false;
    read = ends[0];
    write = ends[1];
    return true;
  }
};

std::vector<std::string> Environment(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!changes.contains(text.substr(0, text.find('=')))) environment.push_back(text);
  }
  for (const auto& [name, value] : changes) environment.push_back(absl::StrCat(name, "=", value));
  return environment;
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

absl::StatusOr<Process> Process::Start(const ProcessOptions& options) {
  Pipe out, err, error;
  if (!out.Open() || !err.Open() || !error.Open()) {
    return absl::ResourceExhaustedError(absl::StrFormat("pipe: %s", std::strerror(errno)));
  }
  std::vector<std::string> command = options.command;
  std::vector<std::string> environment = Environment(options.environment);
  const ChildPlan plan = {.arguments = Pointers(command),
                          .environment = Pointers(environment),
                          .directory = options.directory.c_str(),
                          .stdout_fd = out.write,
                          .stderr_fd = err.write,
                          .error_fd = error.write,
                          .inherited_fds = &options.inherited_fds,
                          .user = options.user.has_value() ? &*options.user : nullptr,
                          .parent = getpid()};
  // Not fork(): gRPC's handlers have no business in a child that only calls exec.
  const pid_t pid = _Fork();
  if (pid == 0) RunChild(plan);
  if (pid < 0) {
    return absl::ResourceExhaustedError(absl::StrFormat("fork: %s", std::strerror(errno)));
  }
  Close(&error.write);  // or its end is never read
  Process process;
  process.pid_ = pid;
  process.stdout_ = std::exchange(out.read, -1);
  process.stderr_ = std::exchange(err.read, -1);
  setpgid(pid, pid);  // as the child does: whoever comes first
  int child_error = 0;
  ssize_t count = 0;
  do {
    count = read(error.read, &child_error, sizeof(child_error));
  } while (count < 0 && errno == EINTR);
  if (count > 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s cannot be started in %s%s: %s", options.command[0], options.directory,
        options.user.has_value() ? absl::StrCat(" as ", options.user->name, " (--run-as)") : "",
        std::strerror(child_error)));
  }
  fcntl(process.stdout_, F_SETFL, O_NONBLOCK);
  fcntl(process.stderr_, F_SETFL, O_NONBLOCK);
  return process;
}

Process::Process(Process&& other) noexcept {
  *this = std::move(other);
}

Process& Process::operator=(Process&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(stdout_, other.stdout_);
  std::swap(stderr_, other.stderr_);
  return *this;
}

Process::~Process() {
  Close(&stdout_);
  Close(&stderr_);
  if (pid_ < 0) return;
  Signal(SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

int Process::TakeStdout() {
  return std::exchange(stdout_, -1);
}
int Process::TakeStderr() {
  return std::exchange(stderr_, -1);
}

void Process::Signal(int signal) {
  if (pid_ > 0) kill(-pid_, signal);
}

std::optional<ExitStatus> Process::Poll() {
  if (pid_ < 0) return std::nullopt;
  // Look before reaping: until then the group's number cannot be given to anybody else.
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid == 0) {
    return std::nullopt;
  }
  Signal(SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  if (WIFSIGNALED(status)) return ExitStatus{.code = 0, .signal = WTERMSIG(status)};
  return ExitStatus{.code = WEXITSTATUS(status), .signal = 0};
}

}  // namespace ringleader::agent
