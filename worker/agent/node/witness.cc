#include "worker/agent/node/witness.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/back_off.h"
#include "base/boot_clock.h"
#include "base/net/channel.h"
#include "base/status_macros.h"
#include "ringleader/v1/worker_control.grpc.pb.h"

namespace ringleader::agent {
namespace {

constexpr char kName[] = "ringleader-witness";
constexpr char kDismissed = 'd';
// Tries for so long. Later the coordinator has given the trainers up by itself.
constexpr absl::Duration kPatience = absl::Minutes(2);
constexpr absl::Duration kFirstBackOff = absl::Milliseconds(50);
constexpr absl::Duration kLongestBackOff = absl::Seconds(1);

// The first thing in the pipe: the options, each closed by a zero byte. They stay off the command
// line, where they would look like the worker's.
std::string Encode(const WitnessOptions& options) {
  std::string text;
  for (const std::string& field :
       {options.coordinator, options.node, options.incarnation, options.tls.cert_path,
        options.tls.key_path, options.tls.ca_path, std::string(options.tls.insecure ? "1" : "")}) {
    text += field;
    text += '\0';
  }
  return text;
}

// One byte; nothing at the pipe's end.
std::optional<char> ReadByte() {
  char byte = 0;
  ssize_t count = 0;
  do {
    count = read(STDIN_FILENO, &byte, 1);
  } while (count < 0 && errno == EINTR);
  return count == 1 ? std::optional(byte) : std::nullopt;
}

std::optional<WitnessOptions> ReadOptions() {
  WitnessOptions options;
  std::string insecure;
  for (std::string* field :
       {&options.coordinator, &options.node, &options.incarnation, &options.tls.cert_path,
        &options.tls.key_path, &options.tls.ca_path, &insecure}) {
    while (true) {
      const std::optional<char> byte = ReadByte();
      if (!byte) return std::nullopt;
      if (*byte == '\0') break;
      *field += *byte;
    }
  }
  options.tls.insecure = !insecure.empty();
  return options;
}

bool WorthTryingAgain(const grpc::Status& status) {
  return status.error_code() == grpc::UNAVAILABLE ||
         status.error_code() == grpc::DEADLINE_EXCEEDED || status.error_code() == grpc::CANCELLED ||
         status.error_code() == grpc::RESOURCE_EXHAUSTED;  // too many calls at the time
}

absl::Status Testify(const WitnessOptions& options) {
  ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel,
                   OpenChannel(options.coordinator, options.tls));
  const auto stub = v1::WorkerControl::NewStub(channel);
  v1::ReportDeathRequest request;
  request.set_node("nodes/" + options.node);
  request.set_incarnation(options.incarnation);
  const absl::Time give_up = BootNow() + kPatience;
  for (uint32_t tries = 1;; ++tries) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(3));
    v1::ReportDeathResponse response;
    const grpc::Status status = stub->ReportDeath(&context, request, &response);
    if (status.ok()) return absl::OkStatus();
    if (!WorthTryingAgain(status) || BootNow() > give_up) {
      return absl::UnavailableError(status.error_message());
    }
    absl::SleepFor(BackOff(kFirstBackOff, kLongestBackOff, tries));
  }
}

}  // namespace

absl::StatusOr<Witness> Witness::Start(const WitnessOptions& options) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return absl::ResourceExhaustedError(absl::StrFormat("pipe: %s", std::strerror(errno)));
  }
  Witness witness(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[0], STDIN_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK);
  std::string name = kName;
  char* const argv[] = {name.data(), nullptr};
  pid_t pid = 0;
  const int error = posix_spawn(&pid, "/proc/self/exe", &actions, &attributes, argv, environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[0]);
  if (error != 0) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("cannot start the worker's witness: %s", std::strerror(error)));
  }
  // It leaves a child of its own and ends, so that nobody has to wait for the child.
  while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  const std::string text = Encode(options);
  if (write(witness.life_fd_, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    return absl::InternalError("the worker's witness did not come up");
  }
  return witness;
}

Witness::Witness(Witness&& other) noexcept : life_fd_(std::exchange(other.life_fd_, -1)) {}

Witness::~Witness() {
  if (life_fd_ < 0) return;
  (void)!write(life_fd_, &kDismissed, 1);
  close(life_fd_);
}

bool IsWitness(int argc, char** argv) {
  return argc == 1 && std::strcmp(argv[0], kName) == 0;
}

int RunWitness() {
  if (fork() != 0) _exit(0);
  prctl(PR_SET_NAME, "rl-witness");
  const std::optional<WitnessOptions> options = ReadOptions();
  if (!options || ReadByte()) return 0;
  return Testify(*options).ok() ? 0 : 1;
}

}  // namespace ringleader::agent
