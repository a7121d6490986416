// The port: what is served on it, to whom, and where it cannot be.
#include "coordinator/api/server.h"

#include <grpcpp/generic/generic_stub.h>

#include <atomic>
#include <filesystem>
#include <optional>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/protocol_version.h"
#include "base/testing/test_certificates.h"
#include "coordinator/api/testing/server_fixture.h"
#include "coordinator/store/testing/hanging_store.h"
#include "ringleader/v1/worker_control.grpc.pb.h"
#include "tests/faults/tcp_proxy.h"

namespace ringleader::api {
namespace {

using ::testing::HasSubstr;
using testing::kDeadline;

class ServerTest : public testing::ServerTest {};

TEST_F(ServerTest, NodesAreListedAndUnknownOnesNamed) {
  v1::ListNodesResponse response;
  ASSERT_TRUE(nodes_->ListNodes(Context().get(), {}, &response).ok());
  EXPECT_EQ(response.nodes_size(), 0);
  v1::DrainNodeRequest request;
  request.set_name("nodes/absent");
  v1::Node node;
  EXPECT_EQ(nodes_->DrainNode(Context().get(), request, &node).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

// A coordinator and a worker of different releases part before either has changed anything.
TEST_F(ServerTest, WorkersOfAnotherProtocolVersionAreRefused) {
  const auto workers = v1::WorkerControl::NewStub(channel_);
  const auto answer = [&](uint32_t version) {
    const auto context = Context();
    const auto stream = workers->Session(context.get());
    v1::WorkerMessage message;
    message.mutable_hello()->set_node("nodes/n1");
    message.mutable_hello()->set_incarnation("folder.process");
    message.mutable_hello()->set_protocol_version(version);
    stream->Write(message);
    v1::CoordinatorMessage reply;
    if (stream->Read(&reply)) {
      EXPECT_EQ(reply.welcome().protocol_version(), kProtocolVersion);
      context->TryCancel();
    }
    return stream->Finish();
  };
  for (const uint32_t version : {0u, kProtocolVersion + 1}) {
    const grpc::Status refused = answer(version);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << version;
    EXPECT_THAT(
        refused.error_message(),
        HasSubstr(absl::StrCat("the worker of nodes/n1 speaks protocol version ", version)));
  }
  v1::ListNodesResponse response;
  ASSERT_TRUE(nodes_->ListNodes(Context().get(), {}, &response).ok());
  EXPECT_EQ(response.nodes_size(), 0);
  EXPECT_EQ(answer(kProtocolVersion).error_code(), grpc::StatusCode::CANCELLED);
}

// One message to a method that this build has no stub of, and the first one back.
std::string RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                    const std::string& bytes) {
  class Call : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    void OnReadDone(bool) override { context.TryCancel(); }
    void OnDone(const grpc::Status&) override { done.Notify(); }
    grpc::ClientContext context;
    grpc::ByteBuffer reply;
    absl::Notification done;
  } call;
  call.context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  grpc::GenericStub stub(channel);
  stub.PrepareBidiStreamingCall(&call.context, method, {}, &call);
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  call.StartRead(&call.reply);
  call.StartWrite(&request);
  call.StartCall();
  call.done.WaitForNotification();
  std::vector<grpc::Slice> slices;
  std::string text;
  if (call.reply.Dump(&slices).ok()) {
    for (const grpc::Slice& part : slices)
      text.append(reinterpret_cast<const char*>(part.begin()), part.size());
  }
  return text;
}

TEST_F(ServerTest, HealthAndReflection) {
  const std::string serving("\x08\x01");  // HealthCheckResponse{status: SERVING}
  const std::string job_service = "ringleader.v1.JobService";
  const std::string request =
      absl::StrCat("\x0a", std::string(1, static_cast<char>(job_service.size())), job_service);
  EXPECT_EQ(RawCall(channel_, "/grpc.health.v1.Health/Check", ""), serving);
  EXPECT_EQ(RawCall(channel_, "/grpc.health.v1.Health/Check", request), serving);
  EXPECT_EQ(RawCall(channel_, "/grpc.health.v1.Health/Check", "\x0a\x01x"), "");  // NOT_FOUND
  const std::string services =
      RawCall(channel_, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
              std::string("\x3a\x00", 2));  // list_services
  for (const char* name : {"JobService", "LogService", "NodeService", "WorkerControl"}) {
    EXPECT_THAT(services, HasSubstr(absl::StrCat("ringleader.v1.", name)));
  }
}

// While the disk is full no job is taken; the coordinator as a whole is well, and restarted by
// nobody.
TEST_F(ServerTest, HealthFollowsTheDisk) {
  class FullStore : public store::testing::ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    absl::Status Space() override {
      return full ? absl::ResourceExhaustedError("the disk is full") : absl::OkStatus();
    }
    std::atomic<bool> full = true;
  };
  std::optional<FullStore> store;
  const absl::Cleanup stop = [&] { server_.reset(); };
  Start({.listen = Loopback(), .check_files = false}, {}, {},
        [&](store::Store* inner) { return &store.emplace(inner); });
  const std::string job_service = "ringleader.v1.JobService";
  const std::string request =
      absl::StrCat("\x0a", std::string(1, static_cast<char>(job_service.size())), job_service);
  const std::string serving("\x08\x01"), not_serving("\x08\x02");
  const auto await = [&](const std::string& state) {
    const absl::Time give_up = absl::Now() + absl::Minutes(1);
    while (absl::Now() < give_up) {
      if (RawCall(channel_, "/grpc.health.v1.Health/Check", request) == state) return true;
    }
    return false;
  };
  EXPECT_TRUE(await(not_serving));
  EXPECT_EQ(RawCall(channel_, "/grpc.health.v1.Health/Check", ""), serving);
  store->full = false;
  EXPECT_TRUE(await(serving));
}

// A message may take thirty times its bytes once it is parsed, which happens before anybody is
// asked who sent it.
TEST_F(ServerTest, ARequestHasASizeThatCanBeAfforded) {
  v1::GetJobRequest request;
  request.set_name(std::string((4 << 20) + 1, 'x'));
  v1::Job job;
  EXPECT_EQ(jobs_->GetJob(Context().get(), request, &job).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  request.set_name("jobs/absent");
  EXPECT_EQ(jobs_->GetJob(Context().get(), request, &job).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServerTest, AUnixSocketIsServed) {
  const std::string path = dir_.File("socket");
  Start({.listen = {.host = "", .port = 0, .path = path}, .check_files = false});
  const auto channel = grpc::CreateChannel("unix:" + path, grpc::InsecureChannelCredentials());
  v1::ListNodesResponse nodes;
  const grpc::Status status =
      v1::NodeService::NewStub(channel)->ListNodes(Context().get(), {}, &nodes);
  EXPECT_TRUE(status.ok()) << status.error_message();
  server_->Shutdown();
  EXPECT_FALSE(std::filesystem::exists(path));
}

// Below its roots by name, and by what a link leads to.
TEST_F(ServerTest, JobsReadAndWriteBelowTheRootsAlone) {
  const std::filesystem::path folder = dir_.File("roots");
  std::filesystem::create_directories(folder / "job");
  std::filesystem::create_directory_symlink("/etc", folder / "job" / "out");
  const auto create = [&](const std::string& train) {
    v1::CreateJobRequest request;
    v1::JobSpec& spec = *request.mutable_spec();
    spec = testing::Spec("j");
    spec.mutable_model()->set_config(folder / "job" / "config.json");
    spec.mutable_data()->set_train(train);
    spec.mutable_data()->set_eval(folder / "job" / "eval");
    spec.mutable_checkpoint()->set_directory(folder / "job" / "checkpoints");
    v1::Job job;
    return jobs_->CreateJob(Context().get(), request, &job);
  };
  Start({.listen = Loopback(), .allowed_paths = {folder}, .check_files = false});
  const grpc::Status outside = create("/etc/tokens");
  EXPECT_EQ(outside.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(outside.error_message(), HasSubstr("data.train"));
  EXPECT_EQ(create(folder / ".." / "tokens").error_code(), grpc::StatusCode::PERMISSION_DENIED);
  const grpc::Status inside = create(folder / "job" / "train");
  EXPECT_TRUE(inside.ok()) << inside.error_message();
  // Where this machine sees the files, links count, too.
  Start({.listen = Loopback(), .allowed_paths = {folder}});
  const grpc::Status through = create(folder / "job" / "out" / "tokens");
  EXPECT_EQ(through.error_code(), grpc::StatusCode::PERMISSION_DENIED) << through.error_message();
}

TEST_F(ServerTest, PortInUseIsSaid) {
  const auto second = Server::Start(
      {.listen = {.host = "127.0.0.1", .port = server_->port(), .path = ""}}, controller_.get(),
      workers_.get(), store_.get(), limits_.get(), registry_.get());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("is in use by another program"));
}

TEST_F(ServerTest, MutualTls) {
  const TestCertificates certificates;
  ASSERT_TRUE(certificates.ok());
  const Address listen{.host = "127.0.0.1", .port = 0, .path = ""};
  Start({.listen = listen, .tls = certificates.Options("server"), .check_files = false});
  v1::ListJobsResponse response;
  const auto list = [&](const TlsOptions& options) {
    const auto credentials = ChannelCredentials(options, listen);
    EXPECT_TRUE(credentials.ok()) << credentials.status();
    Connect(*credentials);
    return jobs_->ListJobs(Context().get(), {}, &response).error_code();
  };
  EXPECT_EQ(list(certificates.Options("client")), grpc::StatusCode::OK);
  EXPECT_EQ(list(certificates.Options("stranger")),
            grpc::StatusCode::UNAVAILABLE);  // server refuses it
  EXPECT_EQ(list(certificates.Options("client", "other")),
            grpc::StatusCode::UNAVAILABLE);            // it refuses the server
  EXPECT_EQ(list({}), grpc::StatusCode::UNAVAILABLE);  // plain text
}

// A filter by label looks at the labels of every job: it counts like a submission, other lists do
// not.
TEST_F(ServerTest, ListsByLabelAreSlowCalls) {
  std::optional<store::testing::HangingStore> hanging;
  const absl::Cleanup stop = [&] { server_.reset(); };
  Start({.listen = Loopback(), .check_files = false}, {.checks_per_client = 1}, {},
        [&](store::Store* store) { return &hanging.emplace(store); });
  hanging->hangs = true;
  struct AsyncList {
    v1::ListJobsRequest request;
    v1::ListJobsResponse response;
    std::unique_ptr<grpc::ClientContext> context = Context();
    grpc::Status status;
    absl::Notification done;
  };
  const auto start = [&](const std::string& filter) {
    auto call = std::make_unique<AsyncList>();
    call->request.set_filter(filter);
    jobs_->async()->ListJobs(call->context.get(), &call->request, &call->response,
                             [call = call.get()](const grpc::Status& status) {
                               call->status = status;
                               call->done.Notify();
                             });
    return call;
  };
  std::vector<std::unique_ptr<AsyncList>> by_state, by_label;
  for (int i = 0; i < 3; ++i) by_state.push_back(start("state=RUNNING"));
  for (int i = 0; i < 2; ++i) by_label.push_back(start("state=RUNNING AND labels.team=ocean"));
  // One of the two is refused at once; without a limit both would end with their deadline.
  while (!by_label[0]->done.HasBeenNotified() && !by_label[1]->done.HasBeenNotified()) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  hanging->go_on.Notify();
  int refused = 0;
  for (const auto& call : by_label) {
    call->done.WaitForNotification();
    if (call->status.ok()) continue;
    ++refused;
    EXPECT_EQ(call->status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(call->status.error_message(), HasSubstr("lists by label at the same time"));
  }
  EXPECT_EQ(refused, 1);
  for (const auto& call : by_state) {
    call->done.WaitForNotification();
    EXPECT_TRUE(call->status.ok()) << call->status.error_message();
  }
}

// A machine that vanished closes no connection, and what it held is for others again.
TEST_F(ServerTest, AWatchOfAMachineThatVanishedEnds) {
  EXPECT_EQ(ServerOptions().keepalive_interval, absl::Seconds(20));
  EXPECT_EQ(ServerOptions().keepalive_patience, absl::Seconds(10));
  limits::Options limits;
  limits.watches_per_client = 1;
  Start({.listen = Loopback(),
         .check_files = false,
         .keepalive_interval = absl::Milliseconds(100),
         .keepalive_patience = absl::Seconds(5)},
        limits);
  Created("a");
  faults::TcpProxy network(server_->port());
  auto direct = std::move(jobs_);
  jobs_ = v1::JobService::NewStub(
      grpc::CreateChannel(network.address(), grpc::InsecureChannelCredentials()));
  const OpenWatch vanishes = Watch("jobs/a");
  ASSERT_TRUE(vanishes.is_admitted);
  network.Cut();
  jobs_ = std::move(direct);
  // Less than kDeadline, with which the watch ends by itself.
  const absl::Time patience = absl::Now() + absl::Seconds(30);
  bool is_admitted = false;
  while (!is_admitted && absl::Now() < patience) {
    is_admitted = Watch("jobs/a").is_admitted;
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_TRUE(is_admitted);
  vanishes.context->TryCancel();
}

// Who connects once does not stay for good: certificates are shown anew, and what was opened goes
// on all the same.
TEST_F(ServerTest, AConnectionGrowsOnlySoOldAndStreamsOutliveIt) {
  EXPECT_EQ(ServerOptions().connection_age, absl::Minutes(10));
  Start({.listen = Loopback(), .check_files = false, .connection_age = absl::Milliseconds(100)});
  v1::Job job = Created("a");
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  const auto context = Context();
  const auto stream = jobs_->WatchJob(context.get(), request);
  v1::WatchJobResponse news;
  ASSERT_TRUE(stream->Read(&news));
  // The channel of this connection takes no call any more.
  EXPECT_TRUE(channel_->WaitForStateChange(GRPC_CHANNEL_READY,
                                           std::chrono::system_clock::now() + kDeadline));
  ASSERT_TRUE(Cancel("jobs/a", &job).ok());  // on the next one
  ASSERT_TRUE(stream->Read(&news));
  EXPECT_EQ(news.job().state(), v1::Job::CANCELLED);
}

}  // namespace
}  // namespace ringleader::api
