// The coordinator's disk runs full under a job.
#include <gmock/gmock.h>
#include <sys/mount.h>

#include <filesystem>
#include <fstream>

#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"
#include "tests/faults/cluster.h"

namespace ringleader::faults {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class DiskTest : public Cluster {};

TEST_F(DiskTest, TrainingOutlastsAFullDiskAndTheRecordIsWhole) {
  const std::string disk = dir() + "/coordinator";
  fs::create_directories(disk);
  if (mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=16m") != 0) {
    GTEST_SKIP() << "mounting a small file system needs CAP_SYS_ADMIN";
  }
  const absl::Cleanup unmount = [&] {
    KillCoordinator();
    umount2(disk.c_str(), MNT_DETACH);
  };
  coordinator_flags_["--reserve-mebibytes"] = 2;
  // Long enough for a worker to find a coordinator that was started anew.
  coordinator_flags_["--fence-after"] = 8;
  coordinator_flags_["--adoption-timeout"] = 10;
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 800, {{"fake-step-ms", "40"}}));
  AwaitStep("job", 7);
  const auto fill_up = [&] {
    std::ofstream ballast(disk + "/ballast", std::ios::app);
    const std::string block(4096, 'b');
    while (ballast.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  };
  fill_up();
  // What fills the disk takes what the coordinator gives up before the coordinator can use it.
  fs::remove(disk + "/ringleader.db.reserve");
  fill_up();
  const absl::Time full = absl::Now();
  // Twice as long as the worker would let its trainers live out of sight of the coordinator.
  const absl::Duration long_enough = absl::Seconds(2 * coordinator_flags_["--fence-after"]);
  ASSERT_TRUE(Eventually([&] { return Audit("job").back().time >= full + long_enough; }));
  v1::CreateJobRequest request;
  *request.mutable_spec() = Spec("refused", 1, 5);
  v1::Job job;
  CallContext context;
  const grpc::Status refused = jobs_->CreateJob(&context, request, &job);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("the disk is full"));
  // A coordinator that is killed meanwhile has its worker back, too.
  KillCoordinator();
  RestartCoordinator();
  const absl::Time restarted = absl::Now();
  ASSERT_TRUE(Eventually([&] {
    const absl::Time last = Audit("job").back().time;
    return last >= restarted + absl::Seconds(1.5 * coordinator_flags_["--fence-after"]) ||
           Audit("job").back().step == 800;
  }));
  fs::remove(disk + "/ballast");
  const v1::Job ended = AwaitState("job", v1::Job::SUCCEEDED);
  EXPECT_EQ(ended.attempts_size(), 1);
  EXPECT_EQ(ended.retries_used(), 0);
  ExpectUnbrokenRecord("job", 800);
  EXPECT_EQ(LogLines("job").size(), 2u * 800u);
}

}  // namespace
}  // namespace ringleader::faults
