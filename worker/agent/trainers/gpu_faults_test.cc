// On which GPUs trainers run, and slots whose GPU is out of order.
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "worker/agent/testing/supervised.h"

namespace ringleader::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What trainers are started with: a line an argument, and what their environment says of CUDA.
constexpr char kSaysHow[] =
    "printf '%s\\n' \"$@\" >how.new; env | grep ^CUDA_[VD] | sort >>how.new; mv how.new how";

std::vector<std::string> SaidIn(const std::string& path) {
  std::vector<std::string> lines;
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (!std::filesystem::exists(path) && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(2));
  }
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

class TlsTrainersTest : public testing::SupervisedTest {
 protected:
  TlsTrainersTest()
      : SupervisedTest({}, {.cert_path = "/tls/cert",
                            .key_path = "/tls/key",
                            .ca_path = "/tls/ca",
                            .insecure = true}) {
    TrainersDo(kSaysHow);
  }
};

TEST_F(TlsTrainersTest, AreStartedWithTheWorkersFilesInTheNameOfTheJobsOwner) {
  v1::Command start = StartOf(7, 1);
  start.mutable_start()->set_owner("-alice");
  EXPECT_TRUE(Do(start).accepted());
  std::vector<std::string> arguments = SaidIn(FolderOf(7, 0) + "/how");
  arguments.resize(14);  // of CUDA the machine's environment may say something
  EXPECT_THAT(arguments, ElementsAre("--socket", data_dir_.socket_path(), "--rank", "0", "--token",
                                     "7", "--tls-cert", "/tls/cert", "--tls-key", "/tls/key",
                                     "--tls-ca", "/tls/ca", "--insecure", "--owner=-alice"));
}

class GpuFaultsTest : public testing::SupervisedTest {
 protected:
  GpuFaultsTest() : SupervisedTest({"GPU-a", "GPU-b"}) {
    TrainersDo("echo $CUDA_VISIBLE_DEVICES >gpu");
  }

  v1::Command StartOnGpus(uint64_t token, uint32_t trainers, const std::string& job = "job") {
    v1::Command command = StartOf(token, trainers, job);
    command.mutable_start()->mutable_spec()->mutable_resources()->set_engine(
        v1::ResourcesSpec::CUDA);
    return command;
  }
  // On which GPU the trainer runs, once it has said so.
  std::string GpuOf(uint64_t token, uint32_t rank, const std::string& job = "job") {
    std::string gpu;
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (!(std::ifstream(FolderOf(token, rank, job) + "/gpu") >> gpu) && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(2));
    }
    return gpu;
  }
};

TEST_F(GpuFaultsTest, ATrainerSeesItsGpuAlone) {
  TrainersDo(kSaysHow);
  EXPECT_TRUE(Do(StartOnGpus(7, 2)).accepted());
  EXPECT_THAT(SaidIn(FolderOf(7, 1) + "/how"),
              ElementsAre("--socket", data_dir_.socket_path(), "--rank", "1", "--token", "7",
                          "CUDA_DEVICE_MAX_CONNECTIONS=32", "CUDA_DEVICE_ORDER=PCI_BUS_ID",
                          "CUDA_VISIBLE_DEVICES=GPU-b"));
}

TEST_F(GpuFaultsTest, EachTrainerHasAGpuOfItsOwnAndLeavesItToTheNext) {
  EXPECT_TRUE(Do(StartOnGpus(7, 2)).accepted());
  EXPECT_EQ(GpuOf(7, 0), "GPU-a");
  EXPECT_EQ(GpuOf(7, 1), "GPU-b");
  kill(PidOf(7, 0), SIGKILL);
  EXPECT_EQ(NextExit().rank(), 0u);
  EXPECT_TRUE(Do(StartOnGpus(8, 1, "next")).accepted());
  EXPECT_EQ(GpuOf(8, 0, "next"), "GPU-a");
}

TEST_F(GpuFaultsTest, TheOthersTakeTheTrainers) {
  supervisor_.SetFaults({{"GPU-a", "XID 79"}});
  const v1::CommandAck two = Do(StartOnGpus(7, 2));
  EXPECT_FALSE(two.accepted());
  EXPECT_THAT(two.message(), HasSubstr("0 of 1 trainers are taken (a GPU is out of order)"));
  EXPECT_TRUE(Do(StartOnGpus(8, 1)).accepted());
  EXPECT_EQ(GpuOf(8, 0), "GPU-b");
}

TEST_F(GpuFaultsTest, WhatRunsThereGoesOnAndTheSlotIsBackAfterAReset) {
  EXPECT_TRUE(Do(StartOnGpus(7, 1, "first")).accepted());
  EXPECT_EQ(GpuOf(7, 0, "first"), "GPU-a");
  supervisor_.SetFaults({{"GPU-a", "XID 79"}});
  ExpectNothing();
  supervisor_.SetFaults({});
  EXPECT_TRUE(Do(StartOnGpus(8, 1, "second")).accepted());
  EXPECT_EQ(GpuOf(8, 0, "second"), "GPU-b");
}

class MoreSlotsThanGpusTest : public testing::SupervisedTest {
 protected:
  MoreSlotsThanGpusTest() : SupervisedTest({"GPU-a"}) {}
};

TEST_F(MoreSlotsThanGpusTest, ASlotWithoutAGpuIsNeverOutOfOrder) {
  supervisor_.SetFaults({{"GPU-a", "XID 79"}});
  EXPECT_TRUE(Do(StartOf(7, 1)).accepted());
  EXPECT_GT(PidOf(7, 0), 0);
}

}  // namespace
}  // namespace ringleader::agent
