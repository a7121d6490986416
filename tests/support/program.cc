#include "tests/support/program.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace ringleader::testing {

std::string ProgramPath(const std::string& name) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / name).string();
}

int FreePort() {
  static absl::Mutex mutex;
  static std::set<int> given;
  absl::MutexLock lock(&mutex);
  std::random_device random;
  for (int tries = 0; tries < 1000; ++tries) {
    const int port = 16384 + static_cast<int>(random() % 16384);
    if (given.contains(port)) continue;
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool is_free =
        bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    close(fd);
    if (!is_free) continue;
    given.insert(port);
    return port;
  }
  throw std::runtime_error("no free port");
}

bool Eventually(const std::function<bool()>& condition, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!condition()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return true;
}

Process::Process(const std::string& program, const std::vector<std::string>& arguments,
                 const std::string& log_path)
    : log_path_(log_path) {
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const int log = open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (log < 0) throw std::runtime_error("cannot write " + log_path);
  pid_ = fork();
  if (pid_ == 0) {
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    execv(program.c_str(), argv.data());
    _exit(127);
  }
  close(log);
}

Process::~Process() {
  KillHard();
}

bool Process::Running() {
  return !Wait(absl::ZeroDuration()).has_value();
}

void Process::Signal(int signal_number) {
  if (!exit_) kill(pid_, signal_number);
}

std::optional<int> Process::Wait(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!exit_) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      exit_ = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    } else if (absl::Now() >= deadline) {
      return std::nullopt;
    } else {
      absl::SleepFor(absl::Milliseconds(5));
    }
  }
  return exit_;
}

void Process::KillHard() {
  Signal(SIGKILL);
  Wait(absl::InfiniteDuration());
}

std::string Process::Log() const {
  std::ostringstream text;
  text << std::ifstream(log_path_).rdbuf();
  return text.str();
}

}  // namespace ringleader::testing
