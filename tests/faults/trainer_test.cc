// The same faults, with the real trainer: what was disturbed ends exactly where what was not does.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "tests/faults/cluster.h"
#include "worker/data/pack/pack_folder.h"
#include "worker/trainer/testing/tiny_job.h"

namespace ringleader::faults {
namespace {

using ::testing::HasSubstr;

class TrainerTest : public Cluster {
 protected:
  TrainerTest() {
    trainer_ = "ringleader-trainer";
    // Real training takes the machine's cores, and heartbeats their time.
    coordinator_flags_["--lease"] = 3;
    GiveTimeToComeBack();
    worker_flags_["--pulse-timeout"] = 30;
  }

  v1::JobSpec TinySpec(const std::string& name) {
    v1::JobSpec spec = trainer::testing::TinyJob(dir(), 4);
    spec.set_name(name);
    spec.mutable_training()->set_steps(40);
    spec.mutable_checkpoint()->set_directory(dir() + "/checkpoints/" + name);
    spec.mutable_checkpoint()->set_every_steps(5);
    spec.mutable_resources()->set_threads(1);
    return spec;
  }

  // It is written while later steps train.
  void AwaitCheckpoint(const std::string& name, uint64_t step) {
    Await(name, [&](const v1::Job& job) { return job.progress().checkpoint_step() >= step; });
  }
};

TEST_F(TrainerTest, AfterEveryKindOfKillTheLossIsThatOfAnUndisturbedRun) {
  StartCoordinator();
  StartWorker("a", 2);
  StartWorker("b", 2);
  Submit(TinySpec("calm"));
  AwaitState("calm", v1::Job::SUCCEEDED, absl::Minutes(4));

  Submit(TinySpec("stormy"));
  AwaitStep("stormy", 7);
  AwaitCheckpoint("stormy", 5);
  const std::vector<int> trainers = TrainerPids("b");
  ASSERT_EQ(trainers.size(), 2u);
  kill(trainers[0], SIGKILL);
  const v1::Job failed = AwaitFailure("stormy");
  EXPECT_EQ(failed.attempts(0).failure().signal(), SIGKILL);
  EXPECT_EQ(failed.attempts(0).failure().node(), "nodes/b");

  AwaitStep("stormy", 17);
  AwaitCheckpoint("stormy", 15);
  KillWorker("b");
  StartWorker("b", 2);
  const v1::Job again = AwaitFailure("stormy", 2);
  EXPECT_EQ(again.attempts(1).failure().node(), "nodes/b");

  AwaitStep("stormy", 27);
  KillCoordinator();
  StartCoordinator();
  const v1::Job job = AwaitState("stormy", v1::Job::SUCCEEDED, absl::Minutes(4));
  EXPECT_EQ(job.attempts_size(), 3);
  EXPECT_GE(job.attempts(1).first_step(), 5u);
  EXPECT_GE(job.attempts(2).first_step(), 15u);

  const std::vector<v1::StepReport> calm = Steps("calm");
  const std::vector<v1::StepReport> stormy = Steps("stormy");
  ASSERT_EQ(calm.size(), 40u);
  ASSERT_EQ(stormy.size(), 40u);
  for (size_t i = 0; i < calm.size(); ++i) {
    EXPECT_EQ(stormy[i].loss(), calm[i].loss()) << "step " << i + 1;
  }
  EXPECT_EQ(job.last_eval().loss(), Get("calm").last_eval().loss());
}

// The daemon stands still and its trainers train on, until their lease is over. Both attempts write
// into one folder.
TEST_F(TrainerTest, AStoppedWorkersTrainersEndWithTheirLeaseAndPublishNothingMore) {
  coordinator_flags_["--fence-after"] = 8;
  coordinator_flags_["--adoption-timeout"] = 10;
  StartCoordinator();
  StartWorker("a", 2);
  v1::JobSpec spec = TinySpec("job");
  spec.mutable_parallelism()->set_context(2);
  spec.mutable_resources()->set_trainers(2);
  spec.mutable_training()->set_steps(3000);
  Submit(spec);
  AwaitStep("job", 7);
  StartWorker("b", 2);
  const std::vector<int> old_trainers = TrainerPids("a");
  ASSERT_EQ(old_trainers.size(), 2u);
  kill(WorkerPid("a"), SIGSTOP);
  const v1::Job job = Await(
      "job", [](const v1::Job& job) { return job.attempts_size() == 2; }, absl::Minutes(2));
  for (const int pid : old_trainers) EXPECT_FALSE(Runs(pid)) << "trains still";
  AwaitStep("job", Get("job").progress().step() + 20);
  const absl::StatusOr<std::string> owner = ReadFile(spec.checkpoint().directory() + "/owner.json");
  ASSERT_TRUE(owner.ok()) << owner.status();
  EXPECT_THAT(*owner, HasSubstr(absl::StrCat("\"token\": ", job.attempts(1).fencing_token())));
  EXPECT_THAT(*owner, HasSubstr(job.uid()));
  // No step was saved twice.
  for (const auto& entry : std::filesystem::directory_iterator(spec.checkpoint().directory())) {
    const std::string name = entry.path().filename();
    EXPECT_FALSE(name.starts_with("step-") && name.ends_with(".1")) << name;
  }
  kill(WorkerPid("a"), SIGCONT);
}

// Not a fault: samples of unequal length, dealt by the planner's weights, through the whole
// service.
TEST_F(TrainerTest, SamplesGoToTheGroupsByThePlannersWeights) {
  const std::string text = dir() + "/samples-text";
  std::filesystem::create_directories(text);
  int file = 0;
  for (const int tokens : {1024, 256, 512, 256}) {
    ++file;
    std::ofstream(absl::StrCat(text, "/", file))
        << std::string(tokens, static_cast<char>('a' + file));
  }
  data::PackOptions pack;
  pack.paths = {text};
  pack.output = dir() + "/samples";
  pack.eval_share = 0;
  ASSERT_TRUE(data::Pack(pack).ok());
  StartCoordinator();
  StartWorker("a", 2);
  StartWorker("b", 2);
  const auto submit = [&](const std::string& name, uint32_t context) {
    v1::JobSpec spec =
        trainer::testing::TinyJob(dir(), static_cast<int>(context), static_cast<int>(4 / context));
    spec.set_name(name);
    spec.mutable_data()->set_sequence_length(1024);
    spec.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
    spec.mutable_data()->set_train(dir() + "/samples/train");
    spec.mutable_data()->clear_eval();
    spec.mutable_attention()->set_pattern(v1::AttentionSpec::DENSE);
    spec.mutable_attention()->clear_sink_tokens();
    spec.mutable_training()->set_global_batch(4);
    spec.mutable_checkpoint()->set_directory(dir() + "/checkpoints/" + name);
    spec.mutable_resources()->set_threads(1);
    Submit(spec);
    AwaitState(name, v1::Job::SUCCEEDED, absl::Minutes(4));
    return Steps(name);
  };
  const std::vector<v1::StepReport> two_groups = submit("two-groups", 2);
  const std::vector<v1::StepReport> one_group = submit("one-group", 4);
  ASSERT_EQ(two_groups.size(), 6u);
  ASSERT_EQ(one_group.size(), 6u);
  for (size_t i = 0; i < two_groups.size(); ++i) {
    EXPECT_EQ(two_groups[i].tokens(), 2048u);
    EXPECT_EQ(two_groups[i].micro_batches(), 2u) << "1024, and three short ones in one";
    EXPECT_EQ(two_groups[i].padding_tokens(), 0u);
    EXPECT_NEAR(two_groups[i].loss(), one_group[i].loss(), 1e-4) << "step " << i + 1;
    // Round robin would give the first group 1024 + 512: sixteen times the tiles of 256 + 256.
    ASSERT_EQ(two_groups[i].rank_tiles_size(), 4);
    const auto group = [&](int first) {
      return static_cast<double>(two_groups[i].rank_tiles(first) +
                                 two_groups[i].rank_tiles(first + 1));
    };
    // Tiles of dense causal attention: 16 blocks make 136, 8 make 36, 4 make 10.
    EXPECT_DOUBLE_EQ(group(0) / group(2), 136.0 / (10 + 36 + 10));
  }
  EXPECT_EQ(Get("two-groups").progress().tokens(), 6u * 2048u);
}

// The plan of a running job changes by its reports; the coordinator is killed between announcing a
// change and the step at which it begins, and a rank is killed after it.
TEST_F(TrainerTest, APlanThatChangesOutlivesTheCoordinatorAndARank) {
  const std::string text = dir() + "/live-text";
  std::filesystem::create_directories(text);
  for (int i = 0; i < 12; ++i) {
    std::ofstream out(absl::StrCat(text, "/", 100 + i));
    for (int b = 0; b < 100 + 70 * i; ++b) out << static_cast<char>('a' + (b * (i + 3)) % 26);
  }
  data::PackOptions pack;
  pack.paths = {text};
  pack.output = dir() + "/live";
  pack.eval_share = 0;
  ASSERT_TRUE(data::Pack(pack).ok());
  StartCoordinator();
  StartWorker("a", 2);
  v1::JobSpec spec = trainer::testing::TinyJob(dir(), 1, 2);
  spec.set_name("live");
  spec.mutable_data()->set_sequence_length(1024);
  spec.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
  spec.mutable_data()->set_train(dir() + "/live/train");
  spec.mutable_data()->clear_eval();
  spec.mutable_parallelism()->set_replan(v1::ParallelismSpec::ALWAYS);
  spec.mutable_training()->set_global_batch(4);
  spec.mutable_training()->set_steps(1'000'000);
  spec.mutable_checkpoint()->set_directory(dir() + "/checkpoints/live");
  spec.mutable_checkpoint()->set_every_steps(20);
  spec.mutable_resources()->set_threads(1);
  Submit(spec);
  const auto changes = [](const v1::Job& job) { return job.attempts().rbegin()->plan_changes(); };
  Await(
      "live", [&](const v1::Job& job) { return job.attempts_size() > 0 && !changes(job).empty(); },
      absl::Minutes(4));
  KillCoordinator();
  StartCoordinator();
  const v1::Job taken = Await(
      "live",
      [&](const v1::Job& job) {
        return std::ranges::any_of(changes(job), [](const v1::PlanChange& change) {
          return change.state() == v1::PlanChange::IN_FORCE;
        });
      },
      absl::Minutes(4));
  EXPECT_EQ(taken.attempts_size(), 1) << "adopted";
  EXPECT_THAT(changes(taken)[0].reasons(0), HasSubstr("samples are dealt by the tiles"));
  const uint64_t version = changes(taken).rbegin()->version();
  AwaitStep("live", taken.progress().step() + 25);  // a checkpoint knows it
  kill(TrainerPids("a")[0], SIGKILL);
  const v1::Job again = Await(
      "live",
      [](const v1::Job& job) {
        return job.attempts_size() == 2 && job.attempts(1).last_step() > 0;
      },
      absl::Minutes(2));
  EXPECT_GE(again.attempts(1).plan().version(), version);
}

}  // namespace
}  // namespace ringleader::faults
