#include "worker/agent/node/inventory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/boot_clock.h"
#include "base/testing/temp_dir.h"

namespace ringleader::agent {
namespace {

using ::testing::HasSubstr;

TEST(InventoryTest, CountsWhatIsThere) {
  const v1::NodeInventory inventory =
      TakeInventory({.trainers = 3, .address = "10.0.0.1", .topology_domain = "rack 3"});
  EXPECT_EQ(inventory.trainers(), 3);
  EXPECT_EQ(inventory.address(), "10.0.0.1");
  EXPECT_EQ(inventory.topology_domain(), "rack 3");
  cpu_set_t cores;
  ASSERT_EQ(sched_getaffinity(0, sizeof(cores), &cores), 0);
  EXPECT_EQ(inventory.cpu_cores(), CPU_COUNT(&cores));
  EXPECT_GT(inventory.memory_bytes(), 0);
}

// Not what happens to be free at its start: trainers of an earlier worker may still be leaving.
TEST(InventoryTest, MemoryIsAllThatTheMachineHas) {
  const TempDir root;
  std::filesystem::create_directories(root.path() / "proc");
  std::ofstream(root.path() / "proc/meminfo") << "MemTotal:       2048 kB\n"
                                                 "MemFree:         512 kB\n"
                                                 "MemAvailable:   1024 kB\n";
  EXPECT_EQ(TakeInventory({.root = root.path()}).memory_bytes(), 2 << 20);
}

TEST(InventoryTest, IsOfTheMachinesNameUnlessItIsToldAnother) {
  char name[256] = {};
  ASSERT_EQ(gethostname(name, sizeof(name) - 1), 0);
  EXPECT_EQ(TakeInventory({}).hostname(), name);
  EXPECT_EQ(TakeInventory({.hostname = "machine-3"}).hostname(), "machine-3");
  // A node's id has the characters that a job's name may have.
  EXPECT_EQ(DefaultNodeId(),
            std::regex_replace(std::string(name), std::regex("[^A-Za-z0-9._-]"), "-"));
}

TEST(InventoryTest, ANodeIsNamedAfterItsMachineAsFarAsIdsAllow) {
  // A process of its own sees a machine of another name.
  const auto id_is = [](const std::string& machine, const std::string& id) {
    const pid_t child = fork();
    if (child < 0) return -1;
    if (child == 0) {
      if (unshare(CLONE_NEWUTS) != 0 || sethostname(machine.data(), machine.size()) != 0) _exit(2);
      _exit(DefaultNodeId() == id ? 0 : 1);
    }
    int status = -1;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  if (id_is("a", "a") == 2) GTEST_SKIP() << "needs the right to name a machine";
  EXPECT_EQ(id_is("azAZ09-._", "azAZ09-._"), 0);
  EXPECT_EQ(id_is("gpu node/3:@[`{", "gpu-node-3-----"), 0);
  EXPECT_EQ(id_is("", "worker"), 0);
}

// Whoever starts the worker may leave it some of the machine's.
TEST(InventoryTest, CountsTheCoresThatItMayUse) {
  std::thread([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(TakeInventory({}).cpu_cores(), 1);
  }).join();
}

TEST(InventoryTest, FacesACoordinatorOnThisMachineThroughLoopback) {
  for (const Address& coordinator : {Address{.host = "127.0.0.1", .port = 7070, .path = ""},
                                     Address{.host = "localhost", .port = 7070, .path = ""},
                                     Address{.host = "", .port = 0, .path = "/run/coordinator"}}) {
    EXPECT_EQ(AddressFacing(coordinator, absl::ZeroDuration()).value(), "127.0.0.1");
  }
}

TEST(InventoryTest, FacesAnotherMachineThroughTheAddressOfTheWayThere) {
  ifaddrs* all = nullptr;
  ASSERT_EQ(getifaddrs(&all), 0);
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, freeifaddrs);
  int looked_at = 0;
  for (const ifaddrs* entry = all; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET) continue;
    if ((entry->ifa_flags & IFF_LOOPBACK) != 0 || (entry->ifa_flags & IFF_UP) == 0) continue;
    char host[NI_MAXHOST] = {};
    ASSERT_EQ(getnameinfo(entry->ifa_addr, sizeof(sockaddr_in), host, sizeof(host), nullptr, 0,
                          NI_NUMERICHOST),
              0);
    // The way to an address of this machine's own is that address.
    const auto address = AddressFacing({.host = host, .port = 7070, .path = ""}, absl::Seconds(1));
    ASSERT_TRUE(address.ok()) << address.status();
    EXPECT_EQ(*address, host);
    ++looked_at;
  }
  if (looked_at == 0) GTEST_SKIP() << "this machine has no network";
}

TEST(InventoryTest, AnAddressThatCannotBeFoundIsAnError) {
  const absl::Time start = BootNow();
  const absl::Status status =
      AddressFacing({.host = "no.such.host.invalid", .port = 7070, .path = ""},
                    absl::Milliseconds(600))
          .status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no.such.host.invalid does not resolve"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--address"));
  EXPECT_GE(BootNow() - start, absl::Milliseconds(600));  // and was tried until then
}

TEST(InventoryTest, ReadsTheDriversFiles) {
  const TempDir root;
  for (const char* bus : {"0000:1b:00.0", "0000:0a:00.0"}) {
    const std::filesystem::path folder = root.path() / "proc/driver/nvidia/gpus" / bus;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "information")
        << "Model: \t\t NVIDIA H200\nIRQ: 1\nGPU UUID: \t GPU-" << bus << "\n";
  }
  const v1::NodeInventory inventory = TakeInventory({.root = root.path()});
  ASSERT_EQ(inventory.gpus_size(), 2);
  EXPECT_EQ(inventory.gpus(0).uuid(), "GPU-0000:0a:00.0");
  EXPECT_EQ(inventory.gpus(0).model(), "NVIDIA H200");
  EXPECT_EQ(inventory.trainers(), 2);  // one a GPU

  // What NVML lists counts, where there is NVML.
  v1::Gpu listed;
  listed.set_uuid("GPU-listed");
  EXPECT_EQ(TakeInventory({.gpus = {listed}, .root = root.path()}).gpus(0).uuid(), "GPU-listed");

  // CUDA sees them by number or by UUID, and nothing after one that is not there.
  const auto first = [&](const char* visible) {
    const auto seen = TakeInventory({.visible_gpus = visible, .root = root.path()});
    return absl::StrCat(seen.gpus_size(), " ", seen.gpus().empty() ? "" : seen.gpus(0).uuid());
  };
  EXPECT_EQ(first("1"), "1 GPU-0000:1b:00.0");
  EXPECT_EQ(first("GPU-0000:1b,0"), "2 GPU-0000:1b:00.0");
  EXPECT_EQ(first(" 1, GPU-0000:0a "), "2 GPU-0000:1b:00.0");
  EXPECT_EQ(first("7,0"), "0 ");
  EXPECT_EQ(first(""), "0 ");

  // Without any it trains on CPUs.
  EXPECT_EQ(TakeInventory({.visible_gpus = "", .root = root.path()}).trainers(), 1);
}

}  // namespace
}  // namespace ringleader::agent
