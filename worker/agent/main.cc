// ringleader-worker: runs trainers on this machine for a coordinator.
#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/metrics/certificate_metrics.h"
#include "base/metrics/metrics.h"
#include "base/net/address.h"
#include "base/net/channel.h"
#include "base/net/message_size.h"
#include "base/net/node_limits.h"
#include "base/net/tls.h"
#include "base/numbers/finite_number.h"
#include "base/process/config.h"
#include "base/process/limits.h"
#include "base/process/logging.h"
#include "base/process/signals.h"
#include "base/process/version.h"
#include "base/standard_streams.h"
#include "base/status_macros.h"
#include "jobspec/roots.h"
#include "worker/agent/gpu/gpu_metrics.h"
#include "worker/agent/gpu/gpu_monitor.h"
#include "worker/agent/node/inventory.h"
#include "worker/agent/node/run_as.h"
#include "worker/agent/node/witness.h"
#include "worker/agent/worker.h"

namespace ringleader::agent {
namespace {

// The name service and the network may come up beside this daemon. This is longer than whatever
// restarts it takes for a crash loop.
constexpr absl::Duration kNetworkPatience = absl::Seconds(15);
// A driver without persistence mode takes seconds to wake the GPUs of a node.
constexpr absl::Duration kDriverPatience = absl::Seconds(60);

struct Flags {
  std::string coordinator = "127.0.0.1:7070";
  std::string data_dir = "./ringleader-worker";
  std::string name = DefaultNodeId();
  std::string trainer_binary;
  std::string metrics_listen = "off";
  bool metrics_public = false;
  InventoryOptions inventory;
  double hang_timeout_seconds = 600;
  double pulse_timeout_seconds = 30;
  double drain_timeout_seconds = 150;
  size_t log_buffer_bytes = size_t{32} << 20;
  std::vector<std::string> allowed_paths;
  std::vector<std::string> run_as;
  TlsOptions tls;
  LoggingOptions logging;
};

void AddFlags(CLI::App& app, Flags* flags) {
  app.add_option("--coordinator", flags->coordinator, "Address of the coordinator")
      ->capture_default_str();
  app.add_option("--data-dir", flags->data_dir,
                 "Folder for this worker's lock, socket and trainers")
      ->capture_default_str();
  app.add_option("--name", flags->name, "This node's id; must be unique and stay the same")
      ->capture_default_str();
  app.add_option("--trainers", flags->inventory.trainers,
                 "Trainers to run at once; 0: one a GPU, or one without GPUs")
      ->check(CLI::Range(0u, kMaxTrainersOfANode))
      ->capture_default_str();
  app.add_option(
      "--address", flags->inventory.address,
      "Host name or IP at which trainers on other nodes reach this one; the one that faces "
      "the coordinator unless set");
  app.add_option("--topology-domain", flags->inventory.topology_domain,
                 "Nodes of one domain share a fast network")
      ->capture_default_str();
  app.add_option("--trainer", flags->trainer_binary,
                 "Path of ringleader-trainer; the one beside this program unless set");
  app.add_option("--metrics-listen", flags->metrics_listen,
                 "Address of http://…/metrics; \"off\" for none")
      ->capture_default_str();
  app.add_flag("--metrics-public", flags->metrics_public,
               "Serve metrics in plain text off loopback, too: to whoever reaches the address");
  app.add_option("--hostname", flags->inventory.hostname,
                 "This machine's name, as dashboards of its GPUs know it; the system's unless set");
  app.add_option("--hang-timeout", flags->hang_timeout_seconds,
                 "Seconds without progress, in the same phase of the same step, after which a "
                 "trainer is killed")
      ->check(UsableSeconds())
      ->capture_default_str();
  app.add_option("--pulse-timeout", flags->pulse_timeout_seconds,
                 "Seconds without a sign of life after which a trainer is killed")
      ->check(UsableSeconds())
      ->capture_default_str();
  app.add_option("--drain-timeout", flags->drain_timeout_seconds,
                 "Seconds that trainers have to write a checkpoint and leave after SIGTERM")
      ->check(UsableSeconds())
      ->capture_default_str();
  app.add_option("--log-buffer-bytes", flags->log_buffer_bytes,
                 "Log lines kept while the coordinator is away")
      ->check(CLI::Range(0.0, 0x1p40))
      ->capture_default_str();
  app.add_option("--run-as", flags->run_as,
                 "User as whom trainers run; OWNER=USER for the jobs of one owner; may be given "
                 "more than once; needs root; the worker's own user unless set")
      ->allow_extra_args(false);
  jobspec::AddRootFlag(app, &flags->allowed_paths);
  AddTlsFlags(app, &flags->tls);
  AddLoggingFlags(app, &flags->logging);
}

absl::StatusOr<std::string> TrainerBinary(const Flags& flags) {
  std::error_code error;
  std::filesystem::path path = flags.trainer_binary;
  if (path.empty()) {
    path =
        std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "ringleader-trainer";
  }
  if (!std::filesystem::exists(path, error)) {
    return absl::NotFoundError("--trainer: " + path.string() + " does not exist");
  }
  return std::filesystem::absolute(path).string();
}

// Trainers of several nodes talk to each other as this worker talks to the coordinator: by mutual
// TLS, or in plain text on loopback, or anywhere with --insecure.
absl::StatusOr<TlsOptions> TlsOfTrainers(const TlsOptions& tls, const std::string& host) {
  const absl::Status status =
      ServerCredentials(tls, {.host = host, .port = 0, .path = ""}).status();
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat("trainers listen on ", host, " for each other (--address): ",
                                     std::string(status.message())));
  }
  TlsOptions absolute = tls;
  if (tls.enabled()) {
    for (std::string* path : {&absolute.cert_path, &absolute.key_path, &absolute.ca_path}) {
      *path = std::filesystem::absolute(*path).string();
    }
  }
  return absolute;
}

absl::Status Serve(const Flags& flags) {
  RETURN_IF_ERROR(jobspec::CheckRoots(flags.allowed_paths));
  ASSIGN_OR_RETURN(const RunAs run_as, RunAs::Parse(flags.run_as));
  ASSIGN_OR_RETURN(const std::string trainer, TrainerBinary(flags));
  ASSIGN_OR_RETURN(DataDir data_dir, DataDir::Open(flags.data_dir, absl::Seconds(10)));
  const std::string incarnation = data_dir.DrawIncarnation();
  ASSIGN_OR_RETURN(const Witness witness, Witness::Start({.coordinator = flags.coordinator,
                                                          .node = flags.name,
                                                          .incarnation = incarnation,
                                                          .tls = flags.tls}));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel,
                   OpenChannel(flags.coordinator, flags.tls, "", arguments));
  const GpuMonitor gpu_monitor({});
  const auto gpu_metrics = std::make_shared<GpuMetrics>(&gpu_monitor);
  Metrics metrics("worker");
  metrics.AddCollectable(gpu_metrics);
  const auto certificates = std::make_shared<CertificateMetrics>(flags.tls);
  metrics.AddCollectable(certificates);
  WorkerMetrics worker_metrics(metrics.registry());
  if (flags.metrics_listen != "off" && !flags.metrics_listen.empty()) {
    ASSIGN_OR_RETURN(const Address address, ParseAddress(flags.metrics_listen));
    RETURN_IF_ERROR(metrics.Listen(address, flags.tls.insecure || flags.metrics_public));
  }
  InventoryOptions inventory_options = flags.inventory;
  if (inventory_options.address.empty()) {
    ASSIGN_OR_RETURN(const Address coordinator, ParseAddress(flags.coordinator));
    ASSIGN_OR_RETURN(inventory_options.address, AddressFacing(coordinator, kNetworkPatience));
    const bool loopback = IsLoopback({.host = inventory_options.address, .port = 0, .path = ""});
    if (loopback && !IsLoopback(coordinator)) {
      spdlog::warn(
          "{} is this machine, by an address that no other machine reaches: trainers of other "
          "nodes cannot connect to {}; give --address unless this is the only node",
          coordinator.host, inventory_options.address);
    }
  }
  ASSIGN_OR_RETURN(const TlsOptions trainer_tls,
                   TlsOfTrainers(flags.tls, inventory_options.address));
  inventory_options.gpus = gpu_monitor.List(kDriverPatience);
  inventory_options.visible_gpus = std::getenv("CUDA_VISIBLE_DEVICES");
  ASSIGN_OR_RETURN(const Address coordinator_address, ParseAddress(flags.coordinator));
  RETURN_IF_ERROR(jobspec::CheckRootsGiven(flags.allowed_paths, coordinator_address));
  const v1::NodeInventory inventory = TakeInventory(inventory_options);
  std::vector<std::string> gpus;
  for (const v1::Gpu& gpu : inventory.gpus()) gpus.push_back(gpu.uuid());
  const WorkerOptions options = {
      .node = flags.name,
      .incarnation = incarnation,
      .inventory = inventory,
      .supervisor = {.trainer_binary = trainer,
                     .slots = inventory.trainers(),
                     .cores = inventory.cpu_cores(),
                     .gpus = gpus,
                     .listen_host = inventory.address(),
                     .tls = trainer_tls,
                     .allowed_paths = flags.allowed_paths,
                     .run_as = run_as,
                     .life_fd = witness.life_fd(),
                     .pulse_timeout = absl::Seconds(flags.pulse_timeout_seconds),
                     .hang_timeout = absl::Seconds(flags.hang_timeout_seconds)},
      .gpu_faults = [&gpu_monitor] { return gpu_monitor.Faults(); },
      .max_log_buffer_bytes = flags.log_buffer_bytes,
      .drain_timeout = absl::Seconds(flags.drain_timeout_seconds)};
  ASSIGN_OR_RETURN(
      const std::unique_ptr<Worker> worker,
      Worker::Create(options, std::move(data_dir), std::move(channel), &worker_metrics));
  spdlog::info("nodes/{} at {}: {} trainers, {} cores, {} GPUs; coordinator {}", flags.name,
               inventory.address(), inventory.trainers(), inventory.cpu_cores(),
               inventory.gpus_size(), flags.coordinator);
  // Trainers die with the thread that started them: that is this one, which ends last.
  std::thread([worker = worker.get()] {
    WaitForShutdownSignal();
    worker->Drain("the worker was told to stop");
  }).detach();
  const absl::Status ended = worker->Run();
  return ended.ok()
             ? ended
             : absl::Status(ended.code(), absl::StrCat("refused by the coordinator at ",
                                                       flags.coordinator, ": ", ended.message()));
}

int Main(int argc, char** argv) {
  if (IsWitness(argc, argv)) return RunWitness();
  BlockShutdownSignals();
  RaiseOpenFileLimit();
  CLI::App app("Runs trainers on this machine for a coordinator.", "ringleader-worker");
  Flags flags;
  AddFlags(app, &flags);
  if (const std::optional<int> code = ParseFlags(app, argc, argv)) return *code;
  SetUpLogging("ringleader-worker", flags.logging);
  spdlog::info("version {}, configuration:", kVersion);
  std::cerr << ResolvedConfig(app) << "\n";
  if (const absl::Status status = Serve(flags); !status.ok()) {
    spdlog::error("{}", std::string(status.message()));
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace ringleader::agent

int main(int argc, char** argv) {
  ringleader::TakeStandardStreams();
  ringleader::FailTooLargeWrites();
  return ringleader::agent::Main(argc, argv);
}
