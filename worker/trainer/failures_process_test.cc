// How attempts of real ringleader-trainer processes fail: what is said of it, what stays, and who
// is taken along.
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/trainer/testing/attempt_test.h"

namespace ringleader::trainer {
namespace {

using ::testing::HasSubstr;
using testing::RankLog;
using v1::TrainerExited;

using TrainerProcessTest = testing::AttemptTest;
using testing::AllReachedStep;
using testing::Losses;
using testing::Stop;

TEST_F(TrainerProcessTest, FewerStepsThanTheCheckpointHasAreRefused) {
  v1::JobSpec spec = Job(1);
  RunToEnd(spec);
  spec.mutable_training()->set_steps(5);
  const v1::TrainerResult result = Failure(spec);
  EXPECT_THAT(result.message(), HasSubstr("is of step 6, training.steps is 5"));
  EXPECT_FALSE(result.retryable());
}

// What a test would look at next is not there: it ends, and the program goes on to the others.
TEST_F(TrainerProcessTest, AnAttemptThatFailsEndsTheTestOfIt) {
  v1::JobSpec spec = Job(1);
  spec.mutable_data()->set_sequence_length(1 << 20);
  EXPECT_THROW(RunToEnd(spec), std::runtime_error);
  EXPECT_THROW(StopEarly(spec), std::runtime_error);
  testing::FakeAgent agent(Path("agent"), spec, testing::TinyPlan(spec), /*ranks=*/1);
  EXPECT_THROW(agent.Spawn("/none", directory_.path().string()), std::runtime_error);
}

TEST_F(TrainerProcessTest, DoesNotBeginAnewWhereACheckpointShouldBe) {
  const v1::JobSpec spec = Job(1);
  checkpoint_step_ = 4;  // in a folder that is not mounted here
  const v1::TrainerResult result = Failure(spec);
  EXPECT_THAT(result.message(), HasSubstr("has no checkpoint, but the job saved one at step 4"));
  EXPECT_TRUE(result.retryable());
}

TEST_F(TrainerProcessTest, AKilledRankTakesTheOthersDownAsCollateral) {
  v1::JobSpec spec = Job(4);
  spec.mutable_training()->set_steps(1'000'000);
  auto agent = Start(spec);
  ASSERT_TRUE(agent->WaitFor([](const std::vector<RankLog>& logs) {
    return AllReachedStep(logs, 2);
  })) << Output();
  kill(agent->pid(2), SIGKILL);
  const std::vector<RankLog> logs = agent->Finish();
  EXPECT_FALSE(logs[2].result.has_value());
  for (int rank : {0, 1, 3}) {
    ASSERT_TRUE(logs[rank].result.has_value()) << Output();
    EXPECT_EQ(logs[rank].result->outcome(), TrainerExited::FAILED);
    EXPECT_TRUE(logs[rank].result->collateral());
    EXPECT_TRUE(logs[rank].result->retryable());
    EXPECT_THAT(logs[rank].result->message(), HasSubstr("rank 2 is gone"));
  }
}

TEST_F(TrainerProcessTest, ARankOpensAsManyFilesAsTheSystemLetsIt) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit low = {.rlim_cur = before.rlim_max / 2, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  const auto agent = Start(Job(1));
  setrlimit(RLIMIT_NOFILE, &before);
  ASSERT_TRUE(agent->WaitFor([](const std::vector<RankLog>& logs) {
    return logs[0].hello.has_value();
  })) << Output();
  rlimit limit = {};
  ASSERT_EQ(prlimit(agent->pid(0), RLIMIT_NOFILE, nullptr, &limit), 0);
  EXPECT_EQ(limit.rlim_cur, before.rlim_max);
  agent->SendToAll(Stop(v1::StopTrainers::ABORT));
  agent->Finish();
}

TEST_F(TrainerProcessTest, AbortEndsItAtOnce) {
  v1::JobSpec spec = Job(2);
  spec.mutable_training()->set_steps(1'000'000);
  auto agent = Start(spec);
  ASSERT_TRUE(agent->WaitFor([](const std::vector<RankLog>& logs) {
    return AllReachedStep(logs, 1);
  })) << Output();
  agent->SendToAll(Stop(v1::StopTrainers::ABORT));
  for (const RankLog& log : agent->Finish()) {
    EXPECT_LT(log.steps.back().step(), 1'000'000u);
    EXPECT_TRUE(log.model_path.empty());
  }
}

TEST_F(TrainerProcessTest, BadInputIsNamedAndNotTriedAgain) {
  v1::JobSpec spec = Job(1);
  spec.mutable_data()->set_sequence_length(1 << 20);
  v1::TrainerResult result = Failure(spec);
  EXPECT_THAT(result.message(), HasSubstr("tokens"));
  EXPECT_FALSE(result.retryable());
  EXPECT_FALSE(result.collateral());

  spec = Job(1);
  spec.mutable_resources()->set_engine(v1::ResourcesSpec::CUDA);
  result = Failure(spec);
  EXPECT_THAT(result.message(), HasSubstr("resources.engine is cuda"));
  EXPECT_FALSE(result.retryable());

  spec = Job(1);
  std::ofstream(Path("config.json")) << R"({"model_type": "qwen2", "vocab_size": 257,
      "hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 20,
      "num_attention_heads": 64, "num_key_value_heads": 64, "max_position_embeddings": 4096,
      "rms_norm_eps": 1e-6, "tie_word_embeddings": true})";
  result = Failure(spec);
  EXPECT_THAT(result.message(), HasSubstr("does not fit: a trainer needs"));
  EXPECT_FALSE(result.retryable());
}

// Another node may have it: the coordinator saw the job's files when it was submitted.
TEST_F(TrainerProcessTest, AFileThatThisNodeLacksIsNamedAndTriedAgain) {
  const auto expect_named = [&](const v1::JobSpec& spec, const std::string& what) {
    const v1::TrainerResult result = Failure(spec);
    EXPECT_THAT(result.message(), HasSubstr(what));
    EXPECT_TRUE(result.retryable()) << result.message();
    EXPECT_FALSE(result.collateral());
  };
  std::ofstream(Path("a-file")) << "where a folder should be";
  v1::JobSpec spec = Job(1);
  UseCheckpoints(&spec, Path("a-file") + "/checkpoints");
  expect_named(spec, "checkpoint.directory cannot be written by rank 0");
  expect_named(spec, Path("a-file"));
  spec = Job(1);
  std::string shard;
  for (const auto& file : std::filesystem::directory_iterator(spec.data().train())) {
    if (file.path().extension() != ".json") shard = file.path();
  }
  std::filesystem::remove(shard);
  expect_named(spec, shard);
  std::filesystem::remove_all(spec.data().train());
  expect_named(spec, spec.data().train());
}

TEST_F(TrainerProcessTest, GradientsThatAreNotFiniteAreSkippedAndThenNamed) {
  v1::JobSpec spec = Job(2);
  // The first update throws the weights so far that the next forward overflows.
  spec.mutable_training()->set_learning_rate(1e30);
  spec.mutable_training()->set_warmup_steps(0);
  spec.mutable_training()->set_steps(50);
  spec.mutable_training()->set_max_skipped_steps(2);
  const std::vector<RankLog> logs = Start(spec)->Finish();
  int first_hand = 0;
  for (const RankLog& log : logs) {
    ASSERT_TRUE(log.result.has_value()) << Output();
    EXPECT_THAT(log.result->message(), HasSubstr("the gradient is NaN or infinite (rank 0, "));
    // All ranks see it at once; the slower one may hear of it from the other first.
    if (!log.result->collateral()) {
      ++first_hand;
      EXPECT_FALSE(log.result->retryable());
    }
    ASSERT_GE(log.steps.size(), 3u) << Output();
    EXPECT_TRUE(log.steps.back().skipped());
    EXPECT_FALSE(log.steps.front().skipped());
  }
  EXPECT_GE(first_hand, 1);
}

void OverwriteByte(const std::string& path, int64_t offset) {
  std::fstream bytes(path, std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekg(offset);
  const int byte = bytes.get();
  bytes.seekp(offset);
  bytes.put(static_cast<char>(byte ^ 0x40));
  ASSERT_TRUE(bytes.good()) << path;
}

TEST_F(TrainerProcessTest, DamagedDataIsNamed) {
  const v1::JobSpec spec = Job(1);
  std::string shard;
  for (const auto& file : std::filesystem::directory_iterator(spec.data().train())) {
    if (file.path().extension() != ".json") shard = file.path();
  }
  const auto expect_named = [&] {
    const v1::TrainerResult result = Failure(spec);
    EXPECT_THAT(result.message(), HasSubstr(shard));
    EXPECT_FALSE(result.retryable());
  };
  OverwriteByte(shard, 200);
  expect_named();
  std::filesystem::resize_file(shard, 200);
  expect_named();
}

TEST_F(TrainerProcessTest, ADamagedModelIsNamed) {
  v1::JobSpec spec = Job(1);
  const std::vector<RankLog> first = RunToEnd(spec);
  const std::string folder = first[0].model_path;
  spec.mutable_model()->clear_config();
  spec.mutable_model()->set_init(folder);
  UseCheckpoints(&spec, Path("tuned"));
  // It starts from what was learnt.
  EXPECT_LT(RunToEnd(spec)[0].evals.front().loss(), first[0].evals.front().loss());

  UseCheckpoints(&spec, Path("never"));
  const std::string weights = folder + "/model.safetensors";
  const auto expect_named = [&] {
    const v1::TrainerResult result = Failure(spec);
    EXPECT_THAT(result.message(), HasSubstr(weights));
    EXPECT_FALSE(result.retryable());
    EXPECT_FALSE(std::filesystem::exists(Path("never") + "/step-0000000002"));
  };
  const auto size = static_cast<int64_t>(std::filesystem::file_size(weights));
  OverwriteByte(weights, size / 2);
  expect_named();
  std::filesystem::resize_file(weights, size - 100);
  expect_named();
}

TEST_F(TrainerProcessTest, DamagedCheckpointsArePassedOverByName) {
  v1::JobSpec spec = Job(2);
  spec.mutable_checkpoint()->set_keep_last(2);
  const std::vector<double> undisturbed = Losses(RunToEnd(spec)[0]);
  const std::string directory = spec.checkpoint().directory();
  const std::string newest = directory + "/step-0000000006/shard-00001-of-00002.bin";
  OverwriteByte(newest, 1000);
  const RankLog resumed = RunToEnd(spec)[0];
  EXPECT_THAT(Output(), HasSubstr("passed over: "));
  EXPECT_THAT(Output(), HasSubstr(newest));
  EXPECT_THAT(Output(), HasSubstr("resuming from " + directory + "/step-0000000004"));
  EXPECT_EQ(Losses(resumed), std::vector<double>(undisturbed.begin() + 4, undisturbed.end()));
  EXPECT_TRUE(std::filesystem::exists(directory + "/step-0000000004")) << "keep_last is 2";
  EXPECT_TRUE(std::filesystem::exists(directory + "/step-0000000006.1"));

  // Where no checkpoint is whole it does not start over as if there had been none.
  std::string last;
  for (const auto& folder : std::filesystem::directory_iterator(directory)) {
    if (!folder.path().filename().string().starts_with("step-")) continue;
    last = folder.path() / "shard-00000-of-00002.bin";
    std::filesystem::resize_file(last, 500);
  }
  const v1::TrainerResult result = Failure(spec);
  EXPECT_THAT(result.message(), HasSubstr("no checkpoint in " + directory + " is whole"));
  EXPECT_FALSE(result.retryable());
}

TEST_F(TrainerProcessTest, AFullDiskIsNamedAndKeepsEarlierCheckpoints) {
  v1::JobSpec spec = Job(2);
  spec.mutable_checkpoint()->set_keep_last(2);
  const std::vector<double> undisturbed = Losses(RunToEnd(spec)[0]);
  const std::string disk = Path("disk");
  std::filesystem::create_directories(disk);
  // Room for two checkpoints of 0.9 MiB; the third is written before the first may go.
  if (mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=2400k") != 0) {
    GTEST_SKIP() << "mounting a small file system needs CAP_SYS_ADMIN";
  }
  const absl::Cleanup unmount = [&] { umount(disk.c_str()); };
  UseCheckpoints(&spec, disk);
  for (const RankLog& log : Start(spec)->Finish()) {
    ASSERT_TRUE(log.result.has_value()) << Output();
    EXPECT_EQ(log.result->outcome(), TrainerExited::FAILED);
    EXPECT_TRUE(log.result->retryable());
    EXPECT_THAT(log.result->message(), HasSubstr(disk + "/.step-0000000006.token-77.partial/"));
    EXPECT_THAT(log.result->message(), HasSubstr("No space left on device"));
  }
  ASSERT_EQ(mount("tmpfs", disk.c_str(), "tmpfs", MS_REMOUNT, "size=20m"), 0);
  const RankLog resumed = RunToEnd(spec)[0];
  EXPECT_EQ(Losses(resumed), std::vector<double>(undisturbed.begin() + 4, undisturbed.end()));
}

// A disk may have room again by the next one. A limit on file size stands in for a full disk.
TEST_F(TrainerProcessTest, ACheckpointThatCannotBeSavedEndsNothing) {
  v1::JobSpec spec = Job(1);
  spec.mutable_training()->set_steps(1'000'000);
  const auto agent = Start(spec);
  size_t saved = 0;
  const auto saves_another = [&] {
    return agent->WaitFor(
        [&](const std::vector<RankLog>& logs) { return logs[0].checkpoints.size() > saved; });
  };
  ASSERT_TRUE(saves_another()) << Output();
  rlimit limit = {};
  ASSERT_EQ(prlimit(agent->pid(0), RLIMIT_FSIZE, nullptr, &limit), 0);
  const rlimit full = {.rlim_cur = 512 << 10, .rlim_max = limit.rlim_max};
  ASSERT_EQ(prlimit(agent->pid(0), RLIMIT_FSIZE, &full, nullptr), 0);
  ASSERT_TRUE(agent->WaitFor([&](const std::vector<RankLog>& logs) {
    saved = logs[0].checkpoints.size();
    return Output().find(": no checkpoint: ") != std::string::npos;
  })) << Output();
  ASSERT_EQ(prlimit(agent->pid(0), RLIMIT_FSIZE, &limit, nullptr), 0);
  EXPECT_TRUE(saves_another()) << Output();
  agent->SendToAll(Stop(v1::StopTrainers::ABORT));
  agent->Finish();
}

}  // namespace
}  // namespace ringleader::trainer
