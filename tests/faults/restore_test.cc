// The coordinator's database is put back from a backup while workers train on.
#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "tests/faults/cluster.h"

namespace ringleader::faults {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::HasSubstr;

class RestoreTest : public Cluster {};

TEST_F(RestoreTest, WorkersAndACoordinatorThatWasPutBackAgreeAgain) {
  GiveTimeToComeBack();
  StartCoordinator();
  StartWorker("a", 2);
  Submit(Spec("job", 2, 250, {{"fake-step-ms", "30"}, {"fake-hold", "240"}}));
  AwaitStep("job", 10);
  StartWorker("b", 1);
  const std::string folder = dir() + "/coordinator";
  const std::string copy = dir() + "/copy.db";
  ASSERT_EQ(std::system(absl::StrCat(bin(), "/ringleader-coordinator --data-dir=", folder,
                                     " --backup=", copy, " > ", copy, ".log 2>&1")
                            .c_str()),
            0);
  // The backup knows nothing of this job.
  Submit(Spec("later", 1, 100'000, {{"fake-step-ms", "30"}}));
  AwaitStep("later", 5);
  AwaitStep("job", 60);
  const int forgotten = PidOf("later", 0);
  KillCoordinator();
  for (const char* suffix : {"-wal", "-shm"}) fs::remove(folder + "/ringleader.db" + suffix);
  fs::rename(copy, folder + "/ringleader.db");
  RestartCoordinator();
  AwaitServing();
  LetGo("job");

  const v1::Job job = AwaitState("job", v1::Job::SUCCEEDED, absl::Seconds(120));
  EXPECT_EQ(job.attempts_size(), 1);  // nobody was disturbed
  EXPECT_EQ(job.progress().step(), 250u);
  EXPECT_THAT(LogLines("job"), Contains(HasSubstr("put back from a backup")));
  // What is missing is what was acknowledged to the worker after the backup, and nothing else.
  uint64_t before = 0;
  int gaps = 0;
  for (const v1::StepReport& step : Steps("job")) {
    if (step.step() != before + 1) ++gaps;
    before = step.step();
  }
  EXPECT_EQ(before, 250u);
  EXPECT_EQ(gaps, 1);
  // The other node is free again, and takes jobs.
  EXPECT_TRUE(Eventually([&] { return !Runs(forgotten); }));
  v1::JobSpec on_both = Spec("after", 3, 5);
  on_both.mutable_data()->set_sequence_length(960);  // divides by three ranks' tiles
  Submit(on_both);
  EXPECT_GT(AwaitState("after", v1::Job::SUCCEEDED).attempts(0).fencing_token(), 1'000'000u);
}

}  // namespace
}  // namespace ringleader::faults
