#include "coordinator/api/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <chrono>
#include <initializer_list>
#include <list>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "base/net/connections.h"
#include "base/net/message_size.h"
#include "base/status_macros.h"
#include "base/wait/timed_wait.h"
#include "coordinator/access/audit_log.h"
#include "coordinator/access/gate.h"
#include "coordinator/api/calls/health_calls.h"
#include "coordinator/api/calls/pulled_stream.h"
#include "coordinator/api/calls/request_bounds.h"
#include "coordinator/api/calls/rpc_metrics.h"
#include "coordinator/api/calls/unary.h"
#include "coordinator/api/services/access_service.h"
#include "coordinator/api/services/job_service.h"
#include "coordinator/api/services/log_service.h"
#include "coordinator/api/services/node_service.h"
#include "jobspec/roots.h"

namespace ringleader::api {
namespace {

// Bytes in gRPC's own buffers, of all connections; connections that would take more are slowed down
// and, at the worst, ended.
constexpr size_t kTransportBytes = size_t{512} << 20;
// Bytes of one stream that wait unread: enough for 5 MB a second over a line of 200 ms. gRPC's
// probe of the line is off, for it raises this to many MB for whoever sends fast.
constexpr int kStreamLookaheadBytes = 1 << 20;
// Threads of gRPC's own for the one service that takes one a stream, which is reflection: a caller
// beyond them is told RESOURCE_EXHAUSTED.
constexpr int kMaxReflectionThreads = 16;
// Calls and streams of one connection; a client's further ones wait at its end.
constexpr int kMaxStreamsOfAConnection = 2000;
// Clients behind NAT ping to keep their connection: allowed this often.
constexpr int kMinPingIntervalMs = 5000;

constexpr absl::Duration kHealthInterval = absl::Milliseconds(500);

constexpr const char* kHealthNames[] = {"",
                                        "ringleader.v1.AccessService",
                                        "ringleader.v1.JobService",
                                        "ringleader.v1.LogService",
                                        "ringleader.v1.NodeService",
                                        "ringleader.v1.WorkerControl"};

int Milliseconds(absl::Duration duration) {
  return static_cast<int>(absl::ToInt64Milliseconds(duration));
}

class ServerImpl : public Server {
 public:
  ServerImpl(const ServerOptions& options, lifecycle::JobController* controller,
             session::WorkerControlService* workers, store::Store* store, limits::Limits* limits,
             prometheus::Registry* registry)
      : options_(options),
        limits_(*limits),
        audit_(store, Clock::Real()),
        gate_(std::make_shared<access::Gate>(
            access::GateOptions{
                .listen = options.listen, .tls = options.tls, .access_path = options.access_path},
            store, &audit_, Clock::Real())),
        metrics_(registry),
        unary_executor_(options.unary_threads),
        stream_executor_(options.stream_threads),
        unary_(&unary_executor_, limits, store, &metrics_, gate_.get(), &audit_,
               options.unread_patience),
        hub_(store, &stream_executor_, &metrics_, gate_.get(), limits),
        access_(store, gate_.get(), &unary_, [this] { hub_.EndOpen(RolesChanged()); }),
        jobs_(controller, &hub_, &unary_, options.check_files, options.allowed_paths,
              options.preview_patience),
        logs_(&hub_),
        nodes_(controller, store, &unary_),
        workers_(*workers),
        store_(*store) {}

  ~ServerImpl() override { ServerImpl::Shutdown(); }

  absl::Status Listen() {
    // Who shows no certificate may have a token, where there are roles.
    ASSIGN_OR_RETURN(const auto credentials, ServerCredentials(options_.tls, options_.listen,
                                                               options_.access_path.empty()
                                                                   ? ClientCertificate::kRequired
                                                                   : ClientCertificate::kOptional));
    RETURN_IF_ERROR(gate_->Load());
    RETURN_IF_ERROR(jobspec::CheckRootsGiven(options_.allowed_paths, options_.listen));
    if (options_.tls.enabled()) credentials->SetAuthMetadataProcessor(gate_);
    workers_.SetGate(gate_);
    if (options_.listen.port != 0) RETURN_IF_ERROR(CheckCanListen(options_.listen));
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    ASSIGN_OR_RETURN(connections_, Connections::Open(options_.listen));
    port_ = connections_->port();
    Connections::Sink hand_over = Connections::ForServer(builder, credentials);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                               kMinPingIntervalMs);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS,
                               Milliseconds(options_.keepalive_interval));
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                               Milliseconds(options_.keepalive_patience));
    builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                               Milliseconds(options_.connection_age));
    // What was sent and is not read yet waits here, in every connection's share of it; beyond that,
    // with those who sent it.
    grpc::ResourceQuota quota("coordinator");
    builder.SetResourceQuota(quota.Resize(kTransportBytes).SetMaxThreads(kMaxReflectionThreads));
    builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamLookaheadBytes);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsOfAConnection);
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> own_calls;
    own_calls.push_back(std::make_unique<HealthCalls>(&limits_.health_calls));
    own_calls.push_back(std::make_unique<OwnRequestBounds>());
    builder.experimental().SetInterceptorCreators(std::move(own_calls));
    for (const auto& [name, service] :
         std::initializer_list<std::pair<const char*, grpc::Service*>>{
             {v1::AccessService::service_full_name(), &access_},
             {v1::JobService::service_full_name(), &jobs_},
             {v1::LogService::service_full_name(), &logs_},
             {v1::NodeService::service_full_name(), &nodes_},
             {v1::WorkerControl::service_full_name(), &workers_}}) {
      const auto* const methods =
          google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
      builder.RegisterService(&services_.emplace_back(service, *methods, gate_.get(), &metrics_));
    }
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) {
      return absl::UnavailableError(absl::StrFormat(
          "cannot listen on %s; see the log lines above, and choose another --listen",
          FormatAddress(options_.listen)));
    }
    connections_->Serve(std::move(hand_over));
    for (const char* name : kHealthNames)
      server_->GetHealthCheckService()->SetServingStatus(name, true);
    // A node shows a certificate, so that workers are only concerned by the file.
    gate_->Watch(
        [this] {
          hub_.EndOpen(RolesChanged());
          workers_.CloseOpen(RolesChanged());
        },
        [this] { hub_.EndOpen(RolesChanged()); });
    health_ = std::thread([this] { ReportHealth(); });
    return absl::OkStatus();
  }

  int port() const override { return port_; }

  std::shared_ptr<grpc::Channel> InProcessChannel() override {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
    return server_->InProcessChannel(arguments);
  }

  const std::string& voucher() const override { return gate_->voucher(); }

  void Shutdown() override {
    if (server_ == nullptr) return;
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    health_.join();
    gate_->StopWatching();
    // Load balancers and clients look elsewhere before calls begin to fail.
    server_->GetHealthCheckService()->Shutdown();
    hub_.EndAll(absl::UnavailableError("the coordinator is shutting down; try again in a moment"));
    workers_.CloseAll();
    connections_.reset();
    server_->Shutdown(
        std::chrono::system_clock::now() +
        std::chrono::microseconds(absl::ToInt64Microseconds(options_.shutdown_grace)));
    server_->Wait();
    server_.reset();
  }

 private:
  // While the disk is full, or the database has been moved, no job is taken: load balancers and
  // dashboards see that of the service that takes jobs. The server serves: started again, it would
  // do no better.
  void ReportHealth() {
    absl::MutexLock lock(&mutex_);
    while (!stopping_) {
      server_->GetHealthCheckService()->SetServingStatus("ringleader.v1.JobService",
                                                         store_.Writable().ok());
      AwaitFor(mutex_, absl::Condition(&stopping_), kHealthInterval);
    }
  }

  // Why open streams end: those who opened them come again at once, and are looked at anew.
  static absl::Status RolesChanged() {
    return absl::UnavailableError("who may do what has changed; the call may be made again");
  }

  const ServerOptions options_;
  limits::Limits& limits_;
  access::AuditLog audit_;
  const std::shared_ptr<access::Gate> gate_;
  RpcMetrics metrics_;
  Executor unary_executor_;
  Executor stream_executor_;
  Unary unary_;
  StreamHub hub_;
  AccessService access_;
  JobService jobs_;
  LogService logs_;
  NodeService nodes_;
  session::WorkerControlService& workers_;
  std::list<BoundedService> services_;  // all of these, as they are served
  store::Store& store_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Connections> connections_;  // they go to the server
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread health_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options,
                                                      lifecycle::JobController* controller,
                                                      session::WorkerControlService* workers,
                                                      store::Store* store, limits::Limits* limits,
                                                      prometheus::Registry* registry) {
  auto server = std::make_unique<ServerImpl>(options, controller, workers, store, limits, registry);
  RETURN_IF_ERROR(server->Listen());
  return server;
}

}  // namespace ringleader::api
