#include "worker/trainer/trainer_main.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/net/tls.h"
#include "base/process/config.h"
#include "base/process/limits.h"
#include "base/process/logging.h"
#include "base/process/process_end.h"
#include "base/process/signals.h"
#include "base/process/trainer_secret.h"
#include "spdlog/spdlog.h"
#include "worker/comm/grpc/grpc_communicator.h"
#include "worker/trainer/link/agent_link.h"
#include "worker/trainer/link/leave_guard.h"

namespace ringleader::trainer {
namespace {

constexpr int kExitFailed = 1;
// The longest that this process lives after an abort.
constexpr absl::Duration kLeaveTimeout = absl::Seconds(3);
// Up to three streams in each direction with every other rank, each a connection; then shards,
// libraries and devices.
constexpr int kConnectionsPerPeer = 6;
constexpr int kOtherFiles = 256;

// Whether another attempt may fare better: not after an error in what the job asks for. A file that
// is not there (NOT_FOUND) may be one that this node has lost: the job's were seen when it was
// submitted.
bool IsRetryable(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
      return false;
    default:
      return true;
  }
}

Result Failure(const absl::Status& status, bool collateral) {
  return {.kind = Result::Kind::kFailed,
          .message = std::string(status.message()),
          .retryable = IsRetryable(status),
          .collateral = collateral};
}

// Ends the process as it is: a failed attempt may still have threads, and a device that hangs.
[[noreturn]] void Leave(AgentLink& link, const Result& result) {
  if (result.kind == Result::Kind::kFailed) spdlog::error("{}", result.message);
  link.ReportResult(result);
  link.Close();
  std::fflush(nullptr);
  _exit(result.kind == Result::Kind::kFailed ? kExitFailed : 0);
}

// gRPC tries again for ever, and says nothing, when no descriptor is left.
void CheckOpenFileLimit(int limit, int world_size) {
  const int wanted = kConnectionsPerPeer * (world_size - 1) + kOtherFiles;
  if (limit >= wanted) return;
  spdlog::warn(
      "this process may open {} files, and {} ranks may need {}: raise the hard limit of the "
      "worker (LimitNOFILE of a systemd unit, ulimit -Hn)",
      limit, world_size, wanted);
}

// Trains from the assignment to the last step; the other ranks hear of a failure before this
// returns.
Result Train(AgentLink& link, uint64_t fencing_token, const std::string& owner,
             const TlsOptions& tls, int open_file_limit, RunFunction run) {
  const auto stopped_or_failed = [](const absl::Status& status) -> Result {
    if (absl::IsCancelled(status)) {
      return {.kind = Result::Kind::kStopped, .message = std::string(status.message())};
    }
    return Failure(status, /*collateral=*/false);
  };
  absl::StatusOr<Assignment> assignment = link.WaitForAssignment();
  if (!assignment.ok()) return stopped_or_failed(assignment.status());
  assignment->job.owner = owner;
  const TrainingJob& job = assignment->job;
  CheckOpenFileLimit(open_file_limit, job.world_size);
  auto listener = comm::GrpcListener::Listen({.rank = job.rank,
                                              .size = job.world_size,
                                              .fencing_token = fencing_token,
                                              .listen_host = assignment->listen_host,
                                              .tls = tls});
  if (!listener.ok()) return Failure(listener.status(), /*collateral=*/false);
  const auto peers = link.ReportReady((*listener)->address());
  if (!peers.ok()) return stopped_or_failed(peers.status());
  auto world = (*listener)->Connect(peers->addresses, peers->certificates);
  if (!world.ok()) return Failure(world.status(), /*collateral=*/true);

  const LeaveGuard guard(**world, kLeaveTimeout, [&link, &world](const absl::Status& status) {
    Leave(link, Failure(status, (*world)->aborted_by_peer()));
  });
  const absl::StatusOr<Outcome> outcome = run(job, **world, link);
  if (outcome.ok()) {
    return {.kind = *outcome == Outcome::kCompleted ? Result::Kind::kCompleted
                                                    : Result::Kind::kStopped};
  }
  const bool collateral = absl::IsAborted(outcome.status()) && (*world)->aborted_by_peer();
  (*listener)->AwaitAbortHeard();
  Leave(link, Failure(outcome.status(), collateral));
}

}  // namespace

int RunProcess(int argc, char** argv, RunFunction run) {
  BlockShutdownSignals();
  const int open_file_limit = RaiseOpenFileLimit();
  CLI::App app("One rank of a Ringleader training job; started by ringleader-worker.");
  AgentLinkOptions options;
  std::string owner;
  LoggingOptions logging = {.one_line = false};  // what LibTorch says may have several
  TlsOptions tls;
  app.add_option("--socket", options.socket, "Unix socket of the worker")->required();
  app.add_option("--rank", options.rank, "this trainer's rank")->required();
  app.add_option("--token", options.fencing_token, "fencing token of the attempt")->required();
  app.add_option("--owner", owner, "who submitted the job; nobody is known unless set");
  AddTlsFlags(app, &tls);
  AddLoggingFlags(app, &logging);
  if (const std::optional<int> code = ParseArguments(app, argc, argv)) return *code;
  SetUpLogging("trainer", logging);
  // The secret comes in the environment, which other users of the machine cannot read, as they can
  // a command line.
  if (const char* secret = std::getenv(kTrainerSecretVariable)) options.secret = secret;
  unsetenv(kTrainerSecretVariable);

  absl::StatusOr<ProcessEnd> end = ProcessEnd::Create();
  if (!end.ok()) {
    spdlog::error("{}", std::string(end.status().message()));
    return kExitFailed;
  }
  // Leaving at once loses nothing: checkpoints are whole or absent, and the worker knows why it
  // asked.
  const auto leave = [](const std::string& reason) {
    spdlog::warn("leaving now: {}", reason);
    _exit(kExitFailed);
  };
  const std::unique_ptr<AgentLink> link =
      AgentLink::Attach(options, leave, [&end, leave](absl::Time lease_end) {
        if (const absl::Status set = end->Set(lease_end); !set.ok()) {
          leave(std::string(set.message()));
        }
      });
  std::thread([&link] {
    WaitForShutdownSignal();
    link->RequestStop("SIGTERM");
  }).detach();

  // The signal thread still refers to the link, and nothing is left to be done.
  Leave(*link, Train(*link, options.fencing_token, owner, tls, open_file_limit, run));
}

}  // namespace ringleader::trainer
