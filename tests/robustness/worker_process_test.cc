// The worker's daemon as a process: what it refuses at its start, and its page for Prometheus.
#include "tests/robustness/worker_process.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/robustness/starting_coordinator.h"

namespace ringleader::testing {
namespace {

using ::testing::HasSubstr;

TEST_F(WorkerProcessTest, MetricsAreClean) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  const std::string address = absl::StrCat("127.0.0.1:", FreePort());
  Process worker =
      Start({{"--coordinator", coordinator_.address()}, {"--metrics-listen", address}});
  const auto connected = [&] {
    return std::system(absl::StrCat("curl -sf http://", address, "/metrics > ",
                                    coordinator_.File("page"),
                                    " && grep -q '^ringleader_worker_connected 1' ",
                                    coordinator_.File("page"))
                           .c_str()) == 0;
  };
  ASSERT_TRUE(Eventually(connected)) << worker.Log();
  EXPECT_EQ(
      std::system(absl::StrCat("promtool check metrics < ", coordinator_.File("page")).c_str()), 0);
  worker.Signal(SIGTERM);
  EXPECT_EQ(worker.Wait(), 0) << worker.Log();
}

// The whole way, from the driver's library to the coordinator's list of nodes.
TEST_F(WorkerProcessTest, AGpuWithUncorrectableErrorsTakesNoTrainers) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  const auto driver_says = [&](const std::string& facts) {
    std::ofstream(coordinator_.File("facts.new")) << facts << "\n";
    std::filesystem::rename(coordinator_.File("facts.new"), coordinator_.File("facts"));
  };
  driver_says("gpus 2\nuncorrected 1 3");
  setenv("RINGLEADER_FAKE_NVML", coordinator_.File("facts").c_str(), 1);
  setenv("LD_LIBRARY_PATH", FAKE_DRIVER_FOLDER, 1);
  Process worker = Start({{"--coordinator", coordinator_.address()}});
  unsetenv("LD_LIBRARY_PATH");
  unsetenv("RINGLEADER_FAKE_NVML");
  const auto nodes = v1::NodeService::NewStub(coordinator_.Channel());
  v1::Node node;
  const auto has_trainers = [&](uint32_t trainers) {
    v1::ListNodesResponse listed;
    nodes->ListNodes(CoordinatorProcess::Context().get(), {}, &listed);
    if (listed.nodes().empty()) return false;
    node = listed.nodes(0);
    return node.inventory().trainers() == trainers;
  };
  ASSERT_TRUE(Eventually([&] { return has_trainers(1); })) << worker.Log();
  EXPECT_EQ(node.inventory().gpus(0).model(), "NVIDIA Fake");
  EXPECT_EQ(node.state_reason(),
            "GPU-fake-1 takes no trainers: 3 uncorrectable memory errors since the driver was "
            "loaded");
  driver_says("gpus 2\nxid 0 95\nuncorrected 1 3");
  ASSERT_TRUE(Eventually([&] { return has_trainers(0); })) << worker.Log();
  EXPECT_EQ(node.state(), v1::Node::DRAINED);
  EXPECT_THAT(node.state_reason(), HasSubstr("GPU-fake-0 takes no trainers: XID 95"));
  // A reset is nothing that the driver reports: it is seen at the next look.
  driver_says("gpus 2");
  EXPECT_TRUE(Eventually([&] { return has_trainers(1); })) << worker.Log();
}

TEST_F(WorkerProcessTest, OffersTheGpusThatCudaWouldSeeAndRunsTrainersThere) {
  std::ofstream(coordinator_.File("facts")) << "gpus 3\n";
  StartingCoordinator coordinator;
  coordinator.spec.mutable_resources()->set_engine(v1::ResourcesSpec::CUDA);
  const std::string trainer = TrainerThatDoes("echo $CUDA_VISIBLE_DEVICES\n");
  setenv("RINGLEADER_FAKE_NVML", coordinator_.File("facts").c_str(), 1);
  setenv("LD_LIBRARY_PATH", FAKE_DRIVER_FOLDER, 1);
  setenv("CUDA_VISIBLE_DEVICES", "2,0", 1);
  Process worker = Start({{"--coordinator", coordinator.address()}, {"--trainer", trainer}});
  unsetenv("CUDA_VISIBLE_DEVICES");
  unsetenv("LD_LIBRARY_PATH");
  unsetenv("RINGLEADER_FAKE_NVML");
  EXPECT_TRUE(Eventually([&] { return worker.Log().find(" 2 GPUs;") != std::string::npos; }))
      << worker.Log();
  ASSERT_TRUE(Eventually([&] { return !coordinator.exits().empty(); })) << worker.Log();
  EXPECT_THAT(coordinator.log(), ::testing::ElementsAre("GPU-fake-2"));
}

TEST_F(WorkerProcessTest, OpensAsManyFilesAsTheSystemLetsIt) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const absl::Cleanup restore = [&] { setrlimit(RLIMIT_NOFILE, &before); };
  const rlimit low = {.rlim_cur = 256, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  Process worker = Start({{"--coordinator", coordinator_.address()}});
  const auto raised = [&] {
    rlimit limit = {};
    return prlimit(worker.pid(), RLIMIT_NOFILE, nullptr, &limit) == 0 &&
           limit.rlim_cur == before.rlim_max;
  };
  EXPECT_TRUE(Eventually(raised)) << worker.Log();
}

// gRPC's own listener stops for good at the first connection for which there is no file: no trainer
// would attach any more.
TEST_F(WorkerProcessTest, ItsTrainersSocketOutlastsAFloodOfConnections) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  const std::string folder = coordinator_.File("worker");
  Process worker(
      "/bin/sh",
      {"-c", "ulimit -n 200; exec \"$0\" \"$@\"", ProgramPath("ringleader-worker"), "--coordinator",
       coordinator_.address(), "--data-dir", folder, "--name", "n1", "--trainer", "/bin/true"},
      coordinator_.File("flooded.log"));
  const std::string path = folder + "/trainers.sock";
  const auto attaches = [&] {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel("unix:" + path, grpc::InsecureChannelCredentials(), arguments)
        ->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(2));
  };
  ASSERT_TRUE(Eventually(attaches)) << worker.Log();
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  ASSERT_LT(path.size(), sizeof(address.sun_path));
  path.copy(address.sun_path, path.size());
  std::vector<int> flood;
  for (int i = 0; i < 300; ++i) {
    flood.push_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(flood.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  pollfd last = {.fd = flood.back(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&last, 1, 20'000), 1) << "the last of them is neither answered nor closed";
  for (const int fd : flood) close(fd);
  EXPECT_TRUE(Eventually(attaches)) << worker.Log();
}

TEST_F(WorkerProcessTest, RefusesOtherAddressesWithoutTls) {
  EXPECT_THAT(Complaint({{"--coordinator", "192.0.2.1:7070"}}),
              HasSubstr("192.0.2.1:7070 is not a loopback address"));
  // Where its trainers would listen for those of other nodes.
  EXPECT_THAT(Complaint({{"--address", "192.0.2.2"}}),
              HasSubstr("trainers listen on 192.0.2.2 for each other (--address)"));
  EXPECT_THAT(Complaint({{"--metrics-listen", "0.0.0.0:9091"}}),
              HasSubstr("0.0.0.0:9091 is not a loopback address"));
  EXPECT_THAT(Complaint({{"--tls-cert", "/none.pem"}}), HasSubstr("--tls-cert: cannot read"));
}

TEST_F(WorkerProcessTest, ItsPageIsForWhoeverReachesItIfItIsToldSo) {
  std::ofstream(coordinator_.File("public.yaml")) << "metrics-public: true\n";
  Process worker = Start({{"--coordinator", coordinator_.address()},
                          {"--metrics-listen", "0.0.0.0:0"},
                          {"--config", coordinator_.File("public.yaml")}});
  EXPECT_TRUE(Eventually([&] {
    return worker.Log().find("metrics are at http://0.0.0.0:") != std::string::npos;
  })) << worker.Log();
}

// Nobody could connect to its trainers, and nobody would know why.
TEST_F(WorkerProcessTest, NeverAdvertisesLoopbackInPlaceOfAnAddressThatItCannotFind) {
  EXPECT_THAT(Complaint({{"--allow-path", "data"}}), HasSubstr("'data' is no absolute path"));
  std::ofstream(coordinator_.File("insecure.yaml")) << "insecure: true\n";
  EXPECT_THAT(Complaint({{"--coordinator", "no.such.host.invalid:7070"},
                         {"--config", coordinator_.File("insecure.yaml")}}),
              HasSubstr("no.such.host.invalid does not resolve"));
  // Others may submit jobs there, and say what they read and write here.
  EXPECT_THAT(Complaint({{"--coordinator", "192.0.2.1:7070"},
                         {"--address", "127.0.0.1"},
                         {"--config", coordinator_.File("insecure.yaml")}}),
              HasSubstr("--allow-path is missing"));
  Process worker = Start({{"--coordinator", coordinator_.address()}});
  EXPECT_TRUE(Eventually([&] {
    return worker.Log().find("nodes/n1 at 127.0.0.1:") != std::string::npos;
  })) << worker.Log();
}

// It shares the machine with trainers that want all cores.
TEST_F(WorkerProcessTest, TakesNoTimeOfTheCoresWhileNothingRuns) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  Process worker = Start({{"--coordinator", coordinator_.address()}});
  ASSERT_TRUE(Eventually([&] {
    return worker.Log().find("in session with the coordinator") != std::string::npos;
  })) << worker.Log();
  const auto used = [&] {
    clockid_t clock = {};
    timespec time = {};
    EXPECT_EQ(clock_getcpuclockid(worker.pid(), &clock), 0);
    EXPECT_EQ(clock_gettime(clock, &time), 0);
    return absl::DurationFromTimespec(time);
  };
  // How often its threads have gone to sleep. A short sleep takes little time, and wakes a core.
  const auto sleeps = [&] {
    std::map<std::string, uint64_t> of_threads;
    for (const auto& thread :
         std::filesystem::directory_iterator(absl::StrCat("/proc/", worker.pid(), "/task"))) {
      std::ifstream status(thread.path() / "status");
      for (std::string key, value; status >> key && std::getline(status, value);) {
        if (key == "voluntary_ctxt_switches:") of_threads[thread.path()] = std::stoull(value);
      }
    }
    return of_threads;
  };
  const absl::Duration before = used();
  std::map<std::string, uint64_t> sleeps_before = sleeps();
  absl::SleepFor(absl::Seconds(1));
  EXPECT_LT(used() - before, absl::Milliseconds(250));
  uint64_t slept = 0;
  for (const auto& [thread, times] : sleeps()) slept += times - sleeps_before[thread];
  EXPECT_LT(slept, 1000u);
}

// What docs/operations.md and the units of deploy/ count on.
TEST_F(WorkerProcessTest, ItsFlagsHaveTheDefaultsThatAreWrittenDown) {
  const std::string path = coordinator_.File("help");
  ASSERT_EQ(std::system(
                absl::StrCat(ProgramPath("ringleader-worker"), " --help >", path, " 2>&1").c_str()),
            0);
  std::ifstream file(path);
  const std::string help(std::istreambuf_iterator<char>(file), {});
  for (const auto& [flag, value] :
       std::map<std::string, std::string>{{"--coordinator", "127.0.0.1:7070"},
                                          {"--data-dir", "./ringleader-worker"},
                                          {"--trainers", "0"},
                                          {"--metrics-listen", "off"},
                                          {"--hang-timeout", "600"},
                                          {"--pulse-timeout", "30"},
                                          {"--drain-timeout", "150"},
                                          {"--log-buffer-bytes", "33554432"}}) {
    EXPECT_THAT(help, ::testing::ContainsRegex(
                          absl::StrCat("\n *", flag, " [A-Z][^\n=]*=", value, "[ \n]")));
  }
}

// A flag of which the worker says nothing could be one that it does not obey.
TEST_F(WorkerProcessTest, SaysWhichFlagsItWasStartedWith) {
  const std::map<std::string, std::string> flags = {
      {"--coordinator", "127.0.0.1:1"}, {"--address", "127.0.0.9"},
      {"--topology-domain", "rack 3"},  {"--hostname", "machine-3"},
      {"--hang-timeout", "601"},        {"--pulse-timeout", "31"},
      {"--drain-timeout", "151"},       {"--log-buffer-bytes", "1234"},
      {"--metrics-listen", "off"},      {"--trainers", "3"}};
  Process worker = Start(flags);
  ASSERT_TRUE(Eventually([&] {
    return worker.Log().find("nodes/n1 at 127.0.0.9: 3 trainers") != std::string::npos;
  })) << worker.Log();
  for (const auto& [flag, value] : flags) {
    EXPECT_THAT(worker.Log(), ::testing::ContainsRegex(
                                  absl::StrCat("\n", flag.substr(2), ": *\"?", value, "\"?\n")));
  }
}

TEST_F(WorkerProcessTest, MistakesAreNamed) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  EXPECT_THAT(Complaint({{"--metrics-listen", coordinator_.address()}}),
              HasSubstr("is in use by another program; stop it or choose another port"));
  EXPECT_THAT(Complaint({{"--trainer", "/none"}}), HasSubstr("--trainer: /none does not exist"));
  for (const auto& [flag, value] :
       std::map<std::string, std::string>{{"--trainers", "4097"},
                                          {"--hang-timeout", "0"},
                                          {"--pulse-timeout", "1e-9"},
                                          {"--drain-timeout", "1e10"}}) {
    EXPECT_THAT(Complaint({{flag, value}}), HasSubstr(flag));
  }
  for (const char* flag : {"--hang-timeout", "--pulse-timeout", "--drain-timeout"}) {
    for (const char* value : {"nan", "inf", "1e999"}) {
      EXPECT_THAT(
          Complaint({{flag, value}}),
          HasSubstr(absl::StrCat(flag, ": '", value, "' is not allowed; give a finite number")));
    }
  }
  std::ofstream(coordinator_.File("config.yaml")) << "coordinater: 127.0.0.1:1\n";
  EXPECT_THAT(Complaint({{"--config", coordinator_.File("config.yaml")}}),
              HasSubstr("coordinater"));
  std::ofstream(coordinator_.File("file")) << "not a folder";
  EXPECT_THAT(Complaint({{"--data-dir", coordinator_.File("file")}}),
              HasSubstr(coordinator_.File("file")));
}

}  // namespace
}  // namespace ringleader::testing
