// ringleader-coordinator: keeps the jobs, schedules them on the workers that call in, and answers
// ringctl.
//
//   ringleader-coordinator --data-dir DIR [--listen HOST:PORT] [--metrics-listen HOST:PORT]
//   [--config FILE]
//   ringleader-coordinator --data-dir DIR --backup FILE
//
// Ends with 0 after SIGTERM or SIGINT; training goes on without it, and it takes up where it left
// when it is back. With 1 if its database turns out to be damaged.
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/synchronization/mutex.h"
#include "base/clock.h"
#include "base/metrics/certificate_metrics.h"
#include "base/metrics/metrics.h"
#include "base/net/tls.h"
#include "base/numbers/finite_number.h"
#include "base/process/config.h"
#include "base/process/limits.h"
#include "base/process/logging.h"
#include "base/process/signals.h"
#include "base/process/version.h"
#include "base/standard_streams.h"
#include "base/status_macros.h"
#include "coordinator/api/metrics/state_metrics.h"
#include "coordinator/api/server.h"
#include "coordinator/lifecycle/job/options.h"
#include "coordinator/lifecycle/job_controller.h"
#include "coordinator/limits/client_limits.h"
#include "coordinator/page/page_server.h"
#include "coordinator/planner_source.h"
#include "coordinator/session/worker_control_service.h"
#include "coordinator/store/files/private_files.h"
#include "coordinator/store/sqlite/sqlite_store.h"
#include "coordinator/store/upkeep/backup.h"
#include "coordinator/store/upkeep/retention.h"
#include "coordinator/trace/job_tracer.h"
#include "jobspec/roots.h"
#include "prometheus/registry.h"

namespace ringleader {
namespace {

struct Flags {
  std::string listen = "127.0.0.1:7070";
  std::string metrics_listen = "127.0.0.1:7071";
  bool metrics_public = false;
  std::string page_listen = "off";
  std::string data_dir;
  int64_t log_mebibytes_per_job = 64;
  int64_t steps_per_job = store::SqliteOptions().steps_per_job;
  int64_t reserve_mebibytes = 64;
  store::RetentionOptions retention;
  std::string backup;
  bool check_files = true;
  std::string access;
  std::vector<std::string> allowed_paths;
  TlsOptions tls;
  LoggingOptions logging;
  PlannerOptions planner;
  lifecycle::Options lifecycle;
  limits::Options limits;
  trace::TraceOptions trace;
};

void AddFlags(CLI::App& app, Flags* flags) {
  app.add_option("--listen", flags->listen, "address for clients and workers")
      ->capture_default_str();
  app.add_option("--data-dir", flags->data_dir, "folder of the database; created if missing")
      ->required();
  app.add_option("--metrics-listen", flags->metrics_listen,
                 "address of http://…/metrics; \"off\" for none")
      ->capture_default_str();
  app.add_flag("--metrics-public", flags->metrics_public,
               "serve metrics in plain text off loopback, too: to whoever reaches the address");
  app.add_option("--page-listen", flags->page_listen,
                 "address of the page that shows jobs and nodes in a browser (docs/page.md); "
                 "\"off\" for none")
      ->capture_default_str();
  app.add_option("--log-mebibytes-per-job", flags->log_mebibytes_per_job,
                 "bound on the stored log of one job")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--steps-per-job", flags->steps_per_job,
                 "bound on the stored step reports of one job: the newest half in full, older ones "
                 "thinned out")
      ->check(CLI::Range(128, 100'000'000))
      ->capture_default_str();
  app.add_option("--reserve-mebibytes", flags->reserve_mebibytes,
                 "space in --data-dir that is given up when the disk runs full, so that training "
                 "goes on until somebody makes room")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  store::AddRetentionFlags(app, &flags->retention);
  app.add_option("--backup", flags->backup,
                 "write a copy of the database, which a coordinator may be using, to this file, "
                 "and end");
  app.add_option(
         "--check-files", flags->check_files,
         "refuse jobs whose files this machine does not see; false when only the workers see them")
      ->default_str("true");
  app.add_option("--access", flags->access,
                 "YAML file: which certificate has which role; needed off loopback "
                 "(docs/security.md)");
  app.add_option("--plan-seconds", flags->planner.seconds,
                 "processor time that the plan of one job may take; more fails the job")
      ->check(UsableSeconds())
      ->capture_default_str();
  app.add_option("--measure-seconds", flags->planner.measure_seconds,
                 "what a job may take before its first step to measure machines and attention that "
                 "are not known (docs/latency.md); a tenth of it on the CPU engine; 0: nothing")
      ->check(FiniteNumber())
      ->check(CLI::Range(0.0, 600.0))
      ->capture_default_str();
  app.add_option_function<double>(
         "--plan-mebibytes",
         [flags](const double& mebibytes) { flags->planner.bytes = mebibytes * 1024 * 1024; },
         "memory that the plan of one job may take; more fails the job")
      ->check(FiniteNumber())
      ->check(CLI::PositiveNumber)
      ->default_str("256");
  jobspec::AddRootFlag(app, &flags->allowed_paths);
  AddTlsFlags(app, &flags->tls);
  AddLoggingFlags(app, &flags->logging);
  lifecycle::AddLifecycleFlags(app, &flags->lifecycle);
  limits::AddLimitFlags(app, &flags->limits);
  trace::AddTraceFlags(app, &flags->trace);
}

std::string DatabaseIn(const std::string& data_dir) {
  return (std::filesystem::path(data_dir) / "ringleader.db").string();
}

absl::Status CheckFlags(const Flags& flags) {
  RETURN_IF_ERROR(lifecycle::Validate(flags.lifecycle));
  RETURN_IF_ERROR(jobspec::CheckRoots(flags.allowed_paths));
  return store::Validate(flags.retention);
}

absl::Status MakeDataDir(const std::string& path) {
  const absl::Status made = store::MakePrivateFolder(path);
  return made.ok() ? made : absl::Status(made.code(), "--data-dir: " + std::string(made.message()));
}

// Ends the process in order, for a reason that only a thread of its own has found.
class Failure {
 public:
  void Set(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      status_ = status;
    }
    kill(getpid(), SIGTERM);
  }
  absl::Status status() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return status_;
  }

 private:
  absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// Starts everything in order: the port opens last, when all that it needs works.
// Null: there is to be none.
absl::StatusOr<std::unique_ptr<page::PageServer>> StartPage(const Flags& flags,
                                                            api::Server& server) {
  if (flags.page_listen == "off") return nullptr;
  ASSIGN_OR_RETURN(Address listen, ParseAddress(flags.page_listen));
  ASSIGN_OR_RETURN(std::unique_ptr<page::PageServer> page,
                   page::PageServer::Start({.listen = listen,
                                            .tls = flags.tls,
                                            .has_roles = !flags.access.empty(),
                                            .voucher = server.voucher()},
                                           server.InProcessChannel()));
  listen.port = page->port();
  spdlog::info("the page is {}://{}", flags.tls.enabled() ? "https" : "http",
               FormatAddress(listen));
  return page;
}

absl::Status Serve(const Flags& flags) {
  RETURN_IF_ERROR(CheckFlags(flags));
  ASSIGN_OR_RETURN(const Address listen, ParseAddress(flags.listen));
  RETURN_IF_ERROR(MakeDataDir(flags.data_dir));

  Metrics metrics("coordinator");
  const auto certificates = std::make_shared<CertificateMetrics>(flags.tls);
  metrics.AddCollectable(certificates);
  api::CommitMetrics commits(&metrics.registry());
  const std::string database = DatabaseIn(flags.data_dir);
  Failure failure;
  ASSIGN_OR_RETURN(const std::unique_ptr<store::Store> store,
                   store::OpenSqliteStore(
                       {.path = database,
                        .log_bytes_per_job = flags.log_mebibytes_per_job << 20,
                        .steps_per_job = flags.steps_per_job,
                        .reserve_bytes = flags.reserve_mebibytes << 20,
                        .clock = Clock::Steady(),
                        .on_commit = [&](absl::Duration duration,
                                         int writes) { commits.OnCommit(duration, writes); },
                        .on_damage = [&](const absl::Status& damage) { failure.Set(damage); }}));
  std::unique_ptr<trace::JobTracer> tracer;
  if (flags.trace.enabled()) {
    const std::filesystem::path log =
        std::filesystem::path(flags.data_dir) / store::kTracesSentName;
    ASSIGN_OR_RETURN(tracer,
                     trace::JobTracer::Start(flags.trace, trace::ExportLimits(), log.string(),
                                             store.get(), Clock::Steady(), &metrics.registry()));
    spdlog::info("traces go to {}", flags.trace.endpoint);
  }
  const std::unique_ptr<lifecycle::PlanSource> plans = NewPlannerSource(flags.planner);
  ASSIGN_OR_RETURN(const std::unique_ptr<lifecycle::JobController> controller,
                   lifecycle::JobController::Create(
                       flags.lifecycle, store.get(), plans.get(), Clock::Steady(), &metrics,
                       [&](const absl::Status& damage) { failure.Set(damage); }));
  const auto collector =
      std::make_shared<api::StateCollector>(store.get(), controller.get(), database);
  metrics.AddCollectable(collector);
  // The page must be gone before what it is made from.
  const absl::Cleanup stop_metrics = [&metrics] { metrics.StopListening(); };
  if (flags.metrics_listen != "off") {
    ASSIGN_OR_RETURN(const Address metrics_listen, ParseAddress(flags.metrics_listen));
    RETURN_IF_ERROR(metrics.Listen(metrics_listen, flags.tls.insecure || flags.metrics_public));
  }

  const store::Retention retention(store.get(), Clock::Real(), Clock::Steady(), flags.retention);
  limits::Limits limits(flags.limits, Clock::Steady(), &metrics.registry());
  session::WorkerControlService workers(controller.get(), Clock::Steady(), &limits);
  controller->Start();
  ASSIGN_OR_RETURN(
      const std::unique_ptr<api::Server> server,
      api::Server::Start({.listen = listen,
                          .tls = flags.tls,
                          .access_path = flags.access,
                          .allowed_paths = flags.allowed_paths,
                          .check_files = flags.check_files},
                         controller.get(), &workers, store.get(), &limits, &metrics.registry()));
  ASSIGN_OR_RETURN(std::unique_ptr<page::PageServer> page, StartPage(flags, *server));
  Address served = listen;
  if (served.path.empty()) served.port = server->port();
  spdlog::info("serving on {}", FormatAddress(served));

  const int signal_number = WaitForShutdownSignal();
  spdlog::info("signal {}: stopping", signal_number);
  page.reset();
  server->Shutdown();
  controller->Stop();
  tracer.reset();
  spdlog::info("stopped");
  return failure.status();
}

}  // namespace

int Main(int argc, char** argv) {
  CLI::App app("Ringleader's coordinator: keeps jobs, schedules them on workers, answers ringctl.",
               "ringleader-coordinator");
  Flags flags;
  AddFlags(app, &flags);
  if (const std::optional<int> exit_code = ParseFlags(app, argc, argv)) return *exit_code;
  // A signal ends a backup by its default action.
  if (flags.backup.empty()) BlockShutdownSignals();
  RaiseOpenFileLimit();
  SetUpLogging("ringleader-coordinator", flags.logging);
  spdlog::info("version {}, configuration:", kVersion);
  std::cerr << ResolvedConfig(app) << "\n";
  const absl::Status status =
      flags.backup.empty() ? Serve(flags) : store::BackUp(DatabaseIn(flags.data_dir), flags.backup);
  if (!status.ok()) {
    spdlog::error("{}", std::string(status.message()));
    return 1;
  }
  if (!flags.backup.empty()) spdlog::info("{} is a copy of the database", flags.backup);
  return 0;
}

}  // namespace ringleader

int main(int argc, char** argv) {
  ringleader::TakeStandardStreams();
  ringleader::FailTooLargeWrites();
  return ringleader::Main(argc, argv);
}
