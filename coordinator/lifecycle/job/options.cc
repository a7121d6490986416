#include "coordinator/lifecycle/job/options.h"

#include <CLI/CLI.hpp>
#include <string>

#include "absl/strings/str_format.h"
#include "base/numbers/finite_number.h"

namespace ringleader::lifecycle {
namespace {

void AddSeconds(CLI::App& app, const std::string& name, const std::string& help,
                absl::Duration* duration) {
  app.add_option_function<double>(
         name, [duration](const double& seconds) { *duration = absl::Seconds(seconds); }, help)
      ->check(UsableSeconds())
      ->type_name("SECONDS")
      ->default_str(absl::StrFormat("%g", absl::ToDoubleSeconds(*duration)))
      ->group("Time-outs");
}

}  // namespace

void AddLifecycleFlags(CLI::App& app, Options* options) {
  AddSeconds(app, "--heartbeat", "Between two heartbeats of a worker",
             &options->heartbeat_interval);
  AddSeconds(app, "--lease", "Silence after which a worker counts as out of sight",
             &options->lease);
  AddSeconds(app, "--adoption-timeout",
             "Out of sight for so long, a worker's trainers are given up and replaced",
             &options->adoption_timeout);
  AddSeconds(app, "--fence-after",
             "A worker kills its trainers after so long without contact; less than "
             "--adoption-timeout",
             &options->fence_after);
  AddSeconds(app, "--start-timeout", "From placement until every trainer is ready",
             &options->start_timeout);
  AddSeconds(app, "--blame-window",
             "After the first failed rank, wait so long for the one whose own fault it was",
             &options->blame_window);
  AddSeconds(app, "--retry-backoff", "Before the first retry; doubles with each one in a row",
             &options->retry_backoff);
  AddSeconds(app, "--max-retry-backoff", "Longest wait before a retry",
             &options->max_retry_backoff);
  AddSeconds(app, "--checkpoint-grace",
             "For trainers that are told to write a checkpoint and stop; then they are killed",
             &options->checkpoint_grace);
  AddSeconds(app, "--abort-grace", "For trainers that are told to stop at once",
             &options->abort_grace);
  app.add_option_function<int64_t>(
         "--keep-nodes",
         [options](const int64_t& days) { options->keep_nodes = absl::Hours(24 * days); },
         "days that a node without trainers is remembered when nothing is heard of it")
      ->check(CLI::Range(1, 36500))
      ->type_name("DAYS")
      ->default_str(absl::StrFormat("%d", options->keep_nodes / absl::Hours(24)));
}

absl::Status Validate(const Options& options) {
  if (options.lease < options.heartbeat_interval * 2) {
    return absl::InvalidArgumentError(
        "--lease must be at least twice --heartbeat, or every lost packet is a lost worker");
  }
  if (options.fence_after < options.lease) {
    return absl::InvalidArgumentError(
        "--fence-after must not be less than --lease, or workers kill healthy trainers");
  }
  // The worker needs time to notice and to kill before its trainers are replaced.
  if (options.fence_after + options.heartbeat_interval > options.adoption_timeout) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--adoption-timeout (%s) must exceed --fence-after (%s) by at least --heartbeat (%s): old "
        "trainers must be dead before new ones start",
        absl::FormatDuration(options.adoption_timeout), absl::FormatDuration(options.fence_after),
        absl::FormatDuration(options.heartbeat_interval)));
  }
  if (options.max_retry_backoff < options.retry_backoff) {
    return absl::InvalidArgumentError("--max-retry-backoff must not be less than --retry-backoff");
  }
  return absl::OkStatus();
}

}  // namespace ringleader::lifecycle
