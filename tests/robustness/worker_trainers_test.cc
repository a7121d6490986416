// The worker's daemon as a process: what its trainers have of it, how it leaves, and who tells of
// its death.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/net/tls.h"
#include "base/protocol_version.h"
#include "base/testing/test_certificates.h"
#include "ringleader/v1/trainer_link.grpc.pb.h"
#include "ringleader/v1/worker_control.grpc.pb.h"
#include "tests/robustness/starting_coordinator.h"
#include "tests/robustness/worker_process.h"

namespace ringleader::testing {
namespace {

// The witness of the worker that has these pipes open, one of which is its input; 0: there is none.
pid_t WitnessOf(const std::set<std::string>& pipes) {
  namespace fs = std::filesystem;
  std::error_code gone;  // processes come and go meanwhile
  for (const auto& process : fs::directory_iterator("/proc", gone)) {
    if (pipes.contains(fs::read_symlink(process.path() / "fd/0", gone).string())) {
      return std::stoi(process.path().filename());
    }
  }
  return 0;
}

std::set<std::string> PipesOf(pid_t process) {
  namespace fs = std::filesystem;
  std::error_code gone;  // its files come and go
  std::set<std::string> pipes;
  for (const auto& file : fs::directory_iterator(absl::StrCat("/proc/", process, "/fd"), gone)) {
    if (std::stoi(file.path().filename()) <= STDERR_FILENO) continue;
    const std::string target = fs::read_symlink(file.path(), gone).string();
    if (target.starts_with("pipe:")) pipes.insert(target);
  }
  return pipes;
}

// Or it would be "exe" to whoever lists processes, or looks for what a worker has left behind; and
// would not end as others do, or would end with the worker's group or session.
TEST_F(WorkerProcessTest, ItsWitnessIsKnownByNameAndHeedsSignalsOfItsOwn) {
  Process worker = Start({{"--coordinator", coordinator_.address()}});
  pid_t witness = 0;
  std::map<std::string, std::string> facts;
  EXPECT_TRUE(Eventually([&] {
    witness = WitnessOf(PipesOf(worker.pid()));
    std::ifstream status(absl::StrCat("/proc/", witness, "/status"));
    for (std::string key, value; status >> key && std::getline(status, value);) {
      facts[key] = value;
    }
    return facts["Name:"] == "\trl-witness";
  })) << worker.Log();
  EXPECT_EQ(facts["SigBlk:"], "\t0000000000000000");
  ASSERT_GT(getsid(witness), 0);
  EXPECT_NE(getsid(witness), getsid(worker.pid()));
  EXPECT_NE(getpgid(witness), getpgid(worker.pid()));
}

// Takes no sessions.
class BusyCoordinator : public v1::WorkerControl::Service {
 public:
  // `answers`: to the reports of deaths, one after the other, the last to all that follow;
  // DEADLINE_EXCEEDED: none, for as long as somebody waits for it.
  explicit BusyCoordinator(std::vector<grpc::StatusCode> answers) : answers_(std::move(answers)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~BusyCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Session(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::WorkerMessage>*) override {
    return {grpc::UNAVAILABLE, "busy"};
  }
  grpc::Status ReportDeath(grpc::ServerContext* context, const v1::ReportDeathRequest* request,
                           v1::ReportDeathResponse*) override {
    grpc::StatusCode answer = grpc::OK;
    {
      absl::MutexLock lock(&mutex_);
      answer = answers_.at(std::min(reports_.size(), answers_.size() - 1));
      reports_.emplace_back(request->node(), absl::Now());
    }
    while (answer == grpc::DEADLINE_EXCEEDED && !context->IsCancelled()) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    return {answer, answer == grpc::OK ? "" : "busy"};
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }
  // Of which node, and when.
  std::vector<std::pair<std::string, absl::Time>> reports() {
    absl::MutexLock lock(&mutex_);
    return reports_;
  }

 private:
  const std::vector<grpc::StatusCode> answers_;
  int port_ = 0;
  absl::Mutex mutex_;
  std::vector<std::pair<std::string, absl::Time>> reports_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::Server> server_;
};

class WitnessTest : public WorkerProcessTest {
 protected:
  // The pipes that a worker of this coordinator had before it was killed.
  std::set<std::string> KillWorkerOf(const BusyCoordinator& busy) {
    Process worker = Start({{"--coordinator", busy.address()}});
    EXPECT_TRUE(Eventually([&] {
      return worker.Log().find("no session with the coordinator") != std::string::npos;
    })) << worker.Log();
    std::set<std::string> pipes = PipesOf(worker.pid());
    EXPECT_GT(WitnessOf(pipes), 0);
    worker.Signal(SIGKILL);
    return pipes;
  }
};

TEST_F(WitnessTest, ItsDeathIsReportedUntilSomebodyHearsOfIt) {
  BusyCoordinator busy({grpc::DEADLINE_EXCEEDED, grpc::UNAVAILABLE, grpc::RESOURCE_EXHAUSTED,
                        grpc::CANCELLED, grpc::OK});
  const std::set<std::string> pipes = KillWorkerOf(busy);
  ASSERT_TRUE(Eventually([&] { return WitnessOf(pipes) == 0; }));
  const auto reports = busy.reports();
  ASSERT_EQ(reports.size(), 5u);
  EXPECT_THAT(reports, ::testing::Each(::testing::Field(&std::pair<std::string, absl::Time>::first,
                                                        "nodes/n1")));
  // Later each time: many witnesses may have the same coordinator to wait for.
  EXPECT_GT(reports[3].second - reports[1].second, absl::Milliseconds(100));
}

TEST_F(WitnessTest, ItsDeathIsReportedOnceToWhoDoesNotWantToHearOfIt) {
  BusyCoordinator busy({grpc::PERMISSION_DENIED});
  const std::set<std::string> pipes = KillWorkerOf(busy);
  EXPECT_TRUE(Eventually([&] { return WitnessOf(pipes) == 0; }));
  EXPECT_EQ(busy.reports().size(), 1u);
}

// Trainers run in folders of their own.
TEST_F(WorkerProcessTest, WhatItIsGivenByRelativePathsItsTrainersFind) {
  namespace fs = std::filesystem;
  const TestCertificates certificates;
  ASSERT_TRUE(certificates.ok());
  StartingCoordinator coordinator(certificates.Options("server"));
  const std::string trainer = TrainerThatDoes("for argument; do echo \"$argument\"; done\n");
  const TlsOptions tls = certificates.Options("client");
  const std::map<std::string, std::string> files = {
      {"--tls-cert", tls.cert_path}, {"--tls-key", tls.key_path}, {"--tls-ca", tls.ca_path}};
  std::map<std::string, std::string> flags = {{"--coordinator", coordinator.address()},
                                              {"--trainer", fs::relative(trainer)}};
  for (const auto& [flag, path] : files) flags[flag] = fs::relative(path);
  Process worker = Start(flags);
  ASSERT_TRUE(Eventually([&] { return !coordinator.exits().empty(); })) << worker.Log();
  EXPECT_EQ(coordinator.exits()[0].message(), "exited with code 0 without giving a reason");
  const std::vector<std::string> arguments = coordinator.log();
  for (const auto& [flag, path] : files) {
    const auto found = std::find(arguments.begin(), arguments.end(), flag);
    ASSERT_LT(found + 1, arguments.end()) << flag;
    EXPECT_TRUE(fs::path(found[1]).is_absolute()) << found[1];
    EXPECT_TRUE(fs::equivalent(found[1], path)) << found[1];
  }
}

// This machine's address on a network, as text; empty: it has none.
std::string NetworkAddress() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, freeifaddrs);
  for (const ifaddrs* entry = all; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET) continue;
    if ((entry->ifa_flags & IFF_LOOPBACK) != 0 || (entry->ifa_flags & IFF_UP) == 0) continue;
    char host[NI_MAXHOST] = {};
    if (getnameinfo(entry->ifa_addr, sizeof(sockaddr_in), host, sizeof(host), nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      return host;
    }
  }
  return "";
}

// Its witness reaches whom it reaches, in plain text, too.
TEST_F(WorkerProcessTest, ItsDeathIsReportedOverANetworkWithoutTls) {
  const std::string host = NetworkAddress();
  if (host.empty()) GTEST_SKIP() << "this machine has no network";
  StartingCoordinator coordinator({}, host);
  std::ofstream(coordinator_.File("insecure.yaml")) << "insecure: true\n";
  Process worker = Start({{"--coordinator", coordinator.address()},
                          {"--config", coordinator_.File("insecure.yaml")},
                          {"--allow-path", "/"}});
  ASSERT_TRUE(Eventually([&] { return !coordinator.exits().empty(); })) << worker.Log();
  EXPECT_EQ(coordinator.deaths(), 0);
  worker.Signal(SIGKILL);
  EXPECT_TRUE(Eventually([&] { return coordinator.deaths() == 1; }, absl::Seconds(20)));
}

// Where trainers of other nodes find its own.
TEST_F(WorkerProcessTest, ItsTrainersListenAtItsAddress) {
  StartingCoordinator coordinator;
  const std::string checkpoints = coordinator_.File("checkpoints");
  std::filesystem::create_directories(checkpoints);
  coordinator.spec.mutable_checkpoint()->set_directory(checkpoints);
  Process worker = Start({{"--coordinator", coordinator.address()},
                          {"--trainer", ProgramPath("fake_trainer")},
                          {"--address", "127.0.0.9"}});
  ASSERT_TRUE(Eventually([&] { return !coordinator.ready_at().empty(); })) << worker.Log();
  EXPECT_THAT(coordinator.ready_at(), ::testing::StartsWith("127.0.0.9:"));
}

// Its witness must not speak before they have ended, and they share the cores among them.
TEST_F(WorkerProcessTest, ItsTrainersHoldItsLifeAndHaveItsCores) {
  StartingCoordinator coordinator;
  const std::string trainer = TrainerThatDoes("echo $$\nexec sleep 600\n");
  Process worker = Start(
      {{"--coordinator", coordinator.address()}, {"--trainer", trainer}, {"--trainers", "1"}});
  ASSERT_TRUE(Eventually([&] { return !coordinator.log().empty(); })) << worker.Log();
  const pid_t pid = std::stoi(coordinator.log()[0]);
  const pid_t witness = WitnessOf(PipesOf(worker.pid()));
  EXPECT_GT(witness, 0);
  EXPECT_EQ(WitnessOf(PipesOf(pid)), witness);

  const auto link = v1::TrainerLink::NewStub(grpc::CreateChannel(
      "unix:" + coordinator_.File("worker/trainers.sock"), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const auto stream = link->Attach(&context);
  v1::TrainerMessage hello;
  hello.mutable_hello()->set_fencing_token(7);
  hello.mutable_hello()->set_pid(static_cast<uint32_t>(pid));
  hello.mutable_hello()->set_protocol_version(kProtocolVersion);
  ASSERT_TRUE(stream->Write(hello));
  v1::AgentMessage answer;
  ASSERT_TRUE(stream->Read(&answer));
  cpu_set_t cores;
  ASSERT_EQ(sched_getaffinity(0, sizeof(cores), &cores), 0);
  EXPECT_EQ(answer.assignment().threads(), static_cast<uint32_t>(CPU_COUNT(&cores)));
  context.TryCancel();
  stream->Finish();
}

TEST_F(WorkerProcessTest, KeepsNoMoreOfLogsThanItIsTold) {
  StartingCoordinator coordinator;
  const std::string trainer = TrainerThatDoes("echo a line\n");
  Process worker = Start({{"--coordinator", coordinator.address()},
                          {"--trainer", trainer},
                          {"--log-buffer-bytes", "0"}});
  ASSERT_TRUE(Eventually([&] { return !coordinator.exits().empty(); })) << worker.Log();
  EXPECT_THAT(coordinator.log(), ::testing::IsEmpty()) << "it had no room for any";
}

// Its coordinator has not stopped what runs, and nobody may outlast the worker.
TEST_F(WorkerProcessTest, AtTheEndOfItsDrainTimeoutItLeavesInOrderAndTellsOfWhatItKilled) {
  StartingCoordinator coordinator;
  const std::string trainer = TrainerThatDoes("echo started\nexec sleep 600\n");
  Process worker = Start({{"--coordinator", coordinator.address()},
                          {"--trainer", trainer},
                          {"--drain-timeout", "0.5"}});
  ASSERT_TRUE(Eventually([&] { return !coordinator.log().empty(); })) << worker.Log();
  const std::set<std::string> pipes = PipesOf(worker.pid());
  EXPECT_GT(WitnessOf(pipes), 0);
  worker.Signal(SIGTERM);
  EXPECT_EQ(worker.Wait(absl::Seconds(20)), 0) << worker.Log();
  ASSERT_EQ(coordinator.exits().size(), 1u) << worker.Log();
  EXPECT_EQ(coordinator.exits()[0].message(), "the worker had to end");
  ASSERT_TRUE(Eventually([&] { return WitnessOf(pipes) == 0; }));
  EXPECT_EQ(coordinator.deaths(), 0) << "it ended in order, and there is nothing to testify";
}

}  // namespace
}  // namespace ringleader::testing
