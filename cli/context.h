// What every ringctl command is given: where to write, how to print, whom to call.
#pragma once

#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/net/tls.h"

namespace ringleader::cli {

class Client;

// kCsv, kJsonLines and kName: of commands that say so (Context::more_formats).
enum class Format { kTable, kJson, kYaml, kCsv, kJsonLines, kName };

// The exit codes that `ringctl --help` promises.
enum ExitCode : int {
  kOk = 0,
  kJobFailed = 1,     // submit --follow, watch: the job FAILED
  kJobCancelled = 2,  // submit --follow, watch: the job was CANCELLED
  kUsage = 64,        // a mistake on the command line, in the job file, or in what they ask for
  kNotFound = 66,     // no such file, job or node
  kUnavailable = 69,  // no coordinator answers
  kInternal = 70,     // a fault of the coordinator or of ringctl
  kOutputLost = 74,   // what was printed could not be written
  kConflict = 75,     // the job's state does not allow it now, or a name is taken
  kForbidden = 77,    // TLS or file permissions
};
int ExitCodeOf(const absl::Status& status);

struct RetryPolicy {
  absl::Duration first_delay = absl::Milliseconds(100);
  absl::Duration longest_delay = absl::Seconds(2);
  // How long a call that changes something, and one that only reads, is tried again while the
  // coordinator is away. Calls that follow a job never give up once they have been answered.
  absl::Duration write_patience = absl::Seconds(60);
  absl::Duration read_patience = absl::Seconds(3);
};

// When a stream whose coordinator's machine has vanished is given up.
struct KeepalivePolicy {
  absl::Duration interval = absl::Seconds(20);  // of silence, after which the coordinator is asked
  absl::Duration patience = absl::Seconds(10);  // for its answer
};

struct Context {
  std::ostream& out;
  std::ostream& err;
  // Returns the width of the terminal `out`; not set where it is none. Bars are redrawn on a
  // terminal, and the last column of a table is cut at its width.
  std::function<int()> terminal_columns = {};
  Clock* clock = Clock::Real();
  std::function<std::optional<std::string>(const char*)> environment;

  // What flags, the environment and the configuration file say.
  std::string address = {};
  std::string config_path = {};
  std::string format_name = {};
  Format format = Format::kTable;
  std::vector<Format> more_formats = {};  // of the command, besides table, json and yaml
  TlsOptions tls = {};
  std::string token_path = {};
  std::string token = {};  // goes with each call; empty: none
  RetryPolicy retry = {};
  KeepalivePolicy keepalive = {};

  // What the command line asks for: an exit code, or the error that the user is to see.
  std::function<absl::StatusOr<int>()> action = {};
};

// 0 where `out` is no terminal.
inline int Columns(const Context& context) {
  return context.terminal_columns ? context.terminal_columns() : 0;
}

// A client for the context's address. INVALID_ARGUMENT for an address or TLS files that cannot
// work; nothing is sent yet.
absl::StatusOr<std::unique_ptr<Client>> Connect(const Context& context);

// Fills address, token, format and TLS options where no flag did: RINGLEADER_ADDRESS and
// RINGLEADER_TOKEN, then the configuration file (--config, RINGLEADER_CONFIG, or
// ~/.config/ringleader/config.yaml), then defaults.
absl::Status ResolveSettings(Context* context);

}  // namespace ringleader::cli
