// The coordinator's gRPC port: all services on it, health and reflection, and an orderly end.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/net/address.h"
#include "base/net/tls.h"
#include "coordinator/lifecycle/job_controller.h"
#include "coordinator/limits/client_limits.h"
#include "coordinator/session/worker_control_service.h"
#include "coordinator/store/store.h"

namespace grpc {
class Channel;
}
namespace prometheus {
class Registry;
}

namespace ringleader::api {

struct ServerOptions {
  Address listen;
  TlsOptions tls = {};
  // YAML file that says which certificate has which role (docs/security.md); empty: no roles.
  std::string access_path = {};
  // Jobs' paths lie below these folders; none: anywhere, which is for loopback alone.
  std::vector<std::string> allowed_paths = {};
  // Refuse jobs whose files this machine does not see.
  bool check_files = true;
  // Threads that run unary calls, most of which wait for the disk or for the controller. Calls that
  // may take seconds get half of them at most, and those of one client half of that.
  int unary_threads = 8;
  // Threads that read the store for WatchJob and TailLogs.
  int stream_threads = 2;
  // New calls go on a new connection after so long, and show a certificate anew; streams stay.
  absl::Duration connection_age = absl::Minutes(10);
  // A client with a call or stream under way that has said nothing for so long is asked whether it
  // is there, and has so long to answer: one that vanished closes no connection.
  absl::Duration keepalive_interval = absl::Seconds(20);
  absl::Duration keepalive_patience = absl::Seconds(10);
  // How long an answer may wait for its client: one of some MiB over a slow line.
  absl::Duration unread_patience = absl::Minutes(1);
  // How long ValidateJob waits for its plan: longer than any one takes. The caller's own deadline
  // is shorter, most times.
  absl::Duration preview_patience = absl::Seconds(30);
  // How long calls may take to end after Shutdown() was called; then they are cut off.
  absl::Duration shutdown_grace = absl::Seconds(5);
};

// Thread-safe.
class Server {
 public:
  // Listens and serves. All must outlive the server. ALREADY_EXISTS when the port is in use;
  // further errors as in ServerCredentials() and access::Gate::Load().
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       lifecycle::JobController* controller,
                                                       session::WorkerControlService* workers,
                                                       store::Store* store, limits::Limits* limits,
                                                       prometheus::Registry* registry);
  virtual ~Server() = default;

  // The port that is served; what was asked for unless that was 0.
  virtual int port() const = 0;

  // Calls of this process to itself: they pass the gate like all others, by the token or the
  // certificate that they carry. They fail once Shutdown() was called.
  virtual std::shared_ptr<grpc::Channel> InProcessChannel() = 0;
  // What those calls show beside a certificate that somebody has shown to this process
  // (access::Gate::kVoucherKey). For no other process.
  virtual const std::string& voucher() const = 0;

  // Health says NOT_SERVING, streams end with UNAVAILABLE, calls under way are answered, then the
  // port closes. The controller must still run. Returns within shutdown_grace and a little.
  // Idempotent.
  virtual void Shutdown() = 0;
};

}  // namespace ringleader::api
