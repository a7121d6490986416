// Whole attempts: real ringleader-trainer processes on a tiny model, under a worker played by the
// test.
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "base/files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/pack_folder.h"
#include "worker/data/token_shard.h"
#include "worker/trainer/testing/attempt_test.h"

namespace ringleader::trainer {
namespace {

using ::testing::HasSubstr;
using testing::RankLog;
using testing::TinyPlan;
using v1::TrainerExited;

using TrainerProcessTest = testing::AttemptTest;
using testing::AllReachedStep;
using testing::Losses;
using testing::Stop;

TEST_F(TrainerProcessTest, TrainsEvaluatesSavesAndExports) {
  const std::vector<RankLog> logs = RunToEnd(Job(2));
  ASSERT_EQ(logs[0].steps.size(), 6u);
  EXPECT_EQ(Losses(logs[0]), Losses(logs[1]));
  EXPECT_LT(logs[0].steps.back().loss(), logs[0].steps.front().loss());

  const v1::StepReport& step = logs[1].steps[2];
  EXPECT_EQ(step.step(), 3u);
  EXPECT_EQ(step.rank(), 1);
  EXPECT_EQ(step.tokens(), 2u * testing::kTinySequence);
  EXPECT_GT(step.gradient_norm(), 0.0);
  EXPECT_GT(step.learning_rate(), 0.0);
  EXPECT_GT(step.step_seconds(), 0.0);
  EXPECT_GT(step.phases().attention_forward(), 0.0);
  EXPECT_GT(step.phases().attention_backward(), 0.0);
  EXPECT_GT(step.phases().linear(), 0.0);
  EXPECT_GT(step.phases().optimizer(), 0.0);
  EXPECT_GT(step.peak_memory_bytes(), 1u << 20);
  EXPECT_EQ(step.plan_version(), 1u);
  ASSERT_EQ(step.layers_size(), 2);
  EXPECT_GT(step.layers(0).density(), 0.0);
  EXPECT_EQ(step.layers(0).tiles_per_ring_step_size(), 2);
  EXPECT_FALSE(step.skipped());

  ASSERT_GE(logs[0].evals.size(), 2u);
  EXPECT_LT(logs[0].evals.back().loss(), logs[0].evals.front().loss());
  EXPECT_EQ(logs[0].evals.front().step(), 0u);
  EXPECT_EQ(logs[0].evals.back().step(), 6u);
  EXPECT_TRUE(logs[1].evals.empty());

  ASSERT_FALSE(logs[0].checkpoints.empty());
  EXPECT_TRUE(std::filesystem::is_directory(logs[0].checkpoints.back().path()));
  EXPECT_EQ(logs[0].checkpoints.back().step(), 6u);
  EXPECT_TRUE(std::filesystem::exists(logs[0].model_path + "/config.json"));
  EXPECT_TRUE(std::filesystem::exists(logs[0].model_path + "/model.safetensors"));
}

TEST_F(TrainerProcessTest, SameSeedSameLossesBitForBit) {
  v1::JobSpec spec = Job(2);
  const std::vector<double> first = Losses(RunToEnd(spec)[0]);
  UseCheckpoints(&spec, Path("again"));
  EXPECT_EQ(Losses(RunToEnd(spec)[0]), first);
  spec.mutable_training()->set_seed(2);
  UseCheckpoints(&spec, Path("other-seed"));
  EXPECT_NE(Losses(RunToEnd(spec)[0]), first);
}

TEST_F(TrainerProcessTest, AnyNumberOfRanksTrainsTheSameModel) {
  v1::JobSpec spec = Job(1);
  spec.mutable_training()->set_eval_sequences(3);  // an odd one for two groups
  const RankLog alone = RunToEnd(spec)[0];
  const std::vector<double> expected = Losses(alone);
  const std::pair<int, int> shapes[] = {{4, 1}, {1, 2}, {2, 2}};  // context, data
  for (const auto& [context, data] : shapes) {
    spec = Job(context, data);
    spec.mutable_training()->set_eval_sequences(3);
    UseCheckpoints(&spec, Path(std::to_string(context) + "x" + std::to_string(data)));
    const RankLog log = RunToEnd(spec)[0];
    const std::vector<double> losses = Losses(log);
    ASSERT_EQ(log.evals.size(), alone.evals.size());
    EXPECT_EQ(log.evals[0].tokens(), alone.evals[0].tokens());
    EXPECT_NEAR(log.evals[0].loss(), alone.evals[0].loss(), 1e-5 * alone.evals[0].loss());
    ASSERT_EQ(losses.size(), expected.size());
    for (size_t i = 0; i < losses.size(); ++i) {
      EXPECT_NEAR(losses[i], expected[i], 1e-4 * expected[i])
          << context << " x " << data << ": " << i;
    }
  }
}

TEST_F(TrainerProcessTest, KeepsPackedDocumentsApartOnAnyNumberOfRanks) {
  v1::JobSpec spec = Job(1);
  spec.mutable_training()->set_eval_sequences(8);
  const RankLog together = RunToEnd(spec)[0];
  spec.mutable_data()->set_document_mask(true);
  UseCheckpoints(&spec, Path("apart"));
  const RankLog apart = RunToEnd(spec)[0];
  EXPECT_NE(Losses(apart), Losses(together));
  EXPECT_NE(apart.evals.front().loss(), together.evals.front().loss());
  EXPECT_LT(apart.steps.back().loss(), apart.steps.front().loss());
  spec = Job(4);
  spec.mutable_data()->set_document_mask(true);
  UseCheckpoints(&spec, Path("4"));
  const std::vector<double> losses = Losses(RunToEnd(spec)[0]), expected = Losses(apart);
  ASSERT_EQ(losses.size(), expected.size());
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_NEAR(losses[i], expected[i], 1e-4 * expected[i]) << i;
  }
}

// Answers of two tasks in tokens that say nothing else: what is asked, on any number of ranks, is
// what the data marks; and a window of one tile answers otherwise than dense attention does.
TEST_F(TrainerProcessTest, EvaluatesAnswersBothWays) {
  v1::JobSpec spec = Job(1);
  std::string ids, marks;
  for (int i = 0; i < 2 * testing::kTinySequence; ++i) {
    ids += std::string({static_cast<char>(i * i % 200), '\0'});
    marks += static_cast<char>(i % 8 == 0 ? 1 : i % 8 == 4 ? 2 : i % 2 == 1 ? data::kGivenMark : 0);
  }
  ASSERT_TRUE(WriteFileAtomically(Path("ids"), ids).ok());
  ASSERT_TRUE(WriteFileAtomically(Path("ids.marks"), marks).ok());
  data::PackOptions pack;
  pack.input = data::PackOptions::Input::kUint16;
  pack.paths = {Path("ids")};
  pack.output = Path("marked");
  pack.eval_share = 0;
  pack.vocabulary = 257;
  pack.separator = 256;
  pack.tasks = {"near", "far"};
  ASSERT_TRUE(data::Pack(pack).ok());
  spec.mutable_data()->set_eval(Path("marked/train"));
  spec.mutable_attention()->set_pattern(v1::AttentionSpec::SLIDING_WINDOW);
  spec.mutable_attention()->set_window(64);
  spec.mutable_training()->set_eval_attention(v1::TrainingSpec::BOTH);
  const RankLog alone = RunToEnd(spec)[0];
  spec = [&] {
    v1::JobSpec four = Job(2, 2);
    *four.mutable_data() = spec.data();
    *four.mutable_attention() = spec.attention();
    *four.mutable_training() = spec.training();
    return four;
  }();
  UseCheckpoints(&spec, Path("four"));
  const RankLog four = RunToEnd(spec)[0];
  for (const RankLog* log : {&alone, &four}) {
    EXPECT_LT(log->steps[0].layers(0).density(), 0.9) << "evaluation changes no training";
    ASSERT_EQ(log->evals.size(), 2u);
    for (size_t e = 0; e < log->evals.size(); ++e) {
      const v1::EvalReport& eval = log->evals[e];
      EXPECT_EQ(eval.tokens(), 511u);
      ASSERT_EQ(eval.answers_size(), 2);
      ASSERT_EQ(eval.dense().answers_size(), 2);
      EXPECT_NE(eval.dense().loss(), eval.loss());
      for (int task = 0; task < 2; ++task) {
        const v1::TaskAnswers& answers = eval.answers(task);
        EXPECT_EQ(answers.task(), task == 0 ? "near" : "far");
        // The first token of all is nobody's label.
        EXPECT_EQ(answers.asked(), task == 0 ? 127u : 128u);
        EXPECT_LE(answers.right(), answers.asked());
        EXPECT_NEAR(answers.loss(), alone.evals[e].answers(task).loss(), 1e-3);
        EXPECT_NEAR(eval.dense().answers(task).loss(), alone.evals[e].dense().answers(task).loss(),
                    1e-3);
      }
    }
  }
  spec.mutable_training()->set_eval_attention(v1::TrainingSpec::DENSE);
  UseCheckpoints(&spec, Path("dense"));
  const RankLog dense = RunToEnd(spec)[0];
  EXPECT_FALSE(dense.evals[0].has_dense());
  EXPECT_NEAR(dense.evals[0].loss(), alone.evals[0].dense().loss(), 1e-3);
  EXPECT_EQ(Losses(dense), Losses(four));
}

TEST_F(TrainerProcessTest, ResumesBitForBitAndOnAnotherNumberOfRanks) {
  v1::JobSpec spec = Job(2);
  spec.mutable_training()->set_steps(40);
  const std::vector<double> undisturbed = Losses(RunToEnd(spec)[0]);

  UseCheckpoints(&spec, Path("stopped"));
  const std::vector<RankLog> stopped = StopEarly(spec);
  ASSERT_FALSE(stopped.empty());
  const uint64_t done = stopped[0].steps.back().step();
  EXPECT_EQ(stopped[0].checkpoints.back().step(), done);
  std::filesystem::copy(Path("stopped"), Path("other"), std::filesystem::copy_options::recursive);

  std::vector<double> losses = Losses(stopped[0]);
  const RankLog resumed = RunToEnd(spec)[0];
  EXPECT_EQ(resumed.steps.front().step(), done + 1);
  for (double loss : Losses(resumed)) losses.push_back(loss);
  EXPECT_EQ(losses, undisturbed);

  spec = Job(1);
  spec.mutable_training()->set_steps(40);
  UseCheckpoints(&spec, Path("other"));
  const std::vector<double> other = Losses(RunToEnd(spec)[0]);
  ASSERT_EQ(other.size(), 40 - done);
  for (size_t i = 0; i < other.size(); ++i) {
    EXPECT_NEAR(other[i], undisturbed[done + i], 1e-4 * undisturbed[done + i]) << i;
  }
}

// An attempt may find another amount of memory than the one before it.
TEST_F(TrainerProcessTest, RecomputePoliciesTrainTheSameModelBitForBit) {
  v1::JobSpec spec = Job(2);
  spec.mutable_resources()->set_recompute(v1::ResourcesSpec::NONE);
  const RankLog kept = RunToEnd(spec)[0];
  EXPECT_THAT(Output(), HasSubstr("| recompute            | none "));
  for (const auto recompute : {v1::ResourcesSpec::ATTENTION_ONLY, v1::ResourcesSpec::FULL}) {
    spec.mutable_resources()->set_recompute(recompute);
    UseCheckpoints(&spec, Path(v1::ResourcesSpec::Recompute_Name(recompute)));
    EXPECT_EQ(Losses(RunToEnd(spec)[0]), Losses(kept));
  }
  EXPECT_THAT(Output(), HasSubstr("| recompute            | full "));
}

TEST_F(TrainerProcessTest, FewerStepsThanTheCheckpointHasAreRefused) {
  v1::JobSpec spec = Job(1);
  RunToEnd(spec);
  spec.mutable_training()->set_steps(5);
  const v1::TrainerResult result = Failure(spec);
  EXPECT_THAT(result.message(), HasSubstr("is of step 6, training.steps is 5"));
  EXPECT_FALSE(result.retryable());
}

TEST_F(TrainerProcessTest, DoesNotBeginAnewWhereACheckpointShouldBe) {
  const v1::JobSpec spec = Job(1);
  checkpoint_step_ = 4;  // in a folder that is not mounted here
  const v1::TrainerResult result = Failure(spec);
  EXPECT_THAT(result.message(), HasSubstr("has no checkpoint, but the job saved one at step 4"));
  EXPECT_TRUE(result.retryable());
}

TEST_F(TrainerProcessTest, SigtermIsACheckpointAndAnOrderlyEnd) {
  v1::JobSpec spec = Job(2);
  spec.mutable_training()->set_steps(500);
  auto agent = Start(spec);
  ASSERT_TRUE(agent->WaitFor([](const std::vector<RankLog>& logs) {
    return AllReachedStep(logs, 1);
  })) << Output();
  for (int rank : {0, 1}) kill(agent->pid(rank), SIGTERM);
  for (const RankLog& log : agent->Finish()) {
    ASSERT_TRUE(log.result.has_value()) << Output();
    EXPECT_EQ(log.result->outcome(), TrainerExited::STOPPED) << log.result->message();
  }
}

TEST_F(TrainerProcessTest, AKilledRankTakesTheOthersDownAsCollateral) {
  v1::JobSpec spec = Job(4);
  spec.mutable_training()->set_steps(500);
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
  spec.mutable_training()->set_steps(500);
  auto agent = Start(spec);
  ASSERT_TRUE(agent->WaitFor([](const std::vector<RankLog>& logs) {
    return AllReachedStep(logs, 1);
  })) << Output();
  agent->SendToAll(Stop(v1::StopTrainers::ABORT));
  for (const RankLog& log : agent->Finish()) {
    EXPECT_LT(log.steps.back().step(), 500u);
    EXPECT_TRUE(log.model_path.empty());
  }
}

TEST_F(TrainerProcessTest, PlansTakeEffectAtOneStepOnAllRanks) {
  v1::JobSpec spec = Job(2);
  spec.mutable_training()->set_steps(500);
  auto agent = Start(spec);
  v1::AgentMessage message;
  v1::StepPlan* plan = message.mutable_plan();
  *plan = TinyPlan(spec);
  plan->set_version(2);
  plan->set_effective_step(4);
  v1::LayerBudget* budget = plan->add_layer_budgets();
  budget->set_layer(1);
  budget->set_dense(true);
  const auto took_version = [](uint64_t version) {
    return [version](const std::vector<RankLog>& logs) {
      for (const RankLog& log : logs) {
        if (log.steps.empty() || log.steps.back().plan_version() != version) return false;
      }
      return true;
    };
  };
  ASSERT_TRUE(agent->WaitFor([](const std::vector<RankLog>& logs) {
    return AllReachedStep(logs, 1);
  })) << Output();
  agent->SendToAll(message);
  ASSERT_TRUE(agent->WaitFor(took_version(2))) << Output();
  // A plan of another layout is refused: the attempt goes on under the last one.
  plan->set_version(3);
  plan->set_layout(v1::ParallelismSpec::CONTIGUOUS);
  agent->SendToAll(message);
  // So is one whose samples weigh less the longer they are.
  plan->set_version(4);
  plan->set_layout(v1::ParallelismSpec::STRIPED);
  for (const uint64_t tokens : {100, 50}) plan->add_sample_weights()->set_tokens(tokens);
  agent->SendToAll(message);
  plan->set_version(5);
  plan->clear_sample_weights();
  agent->SendToAll(message);
  ASSERT_TRUE(agent->WaitFor(took_version(5))) << Output();
  agent->SendToAll(Stop(v1::StopTrainers::CHECKPOINT));
  const std::vector<RankLog> logs = agent->Finish();
  ASSERT_EQ(logs[0].steps.size(), logs[1].steps.size());
  for (size_t i = 0; i < logs[0].steps.size(); ++i) {
    const v1::StepReport& step = logs[0].steps[i];
    EXPECT_EQ(step.plan_version(), logs[1].steps[i].plan_version());
    EXPECT_NE(step.plan_version(), 3u);
    EXPECT_NE(step.plan_version(), 4u);
    if (step.plan_version() == 2) {
      EXPECT_GE(step.step(), 4u);
      EXPECT_DOUBLE_EQ(step.layers(1).density(), 1.0);
    }
  }
}

TEST_F(TrainerProcessTest, EveryRankTracesTheStepsThatItIsAskedFor) {
  v1::JobSpec spec = Job(2);
  spec.mutable_training()->set_steps(500);
  auto agent = Start(spec);
  ASSERT_TRUE(agent->WaitFor([](const std::vector<RankLog>& logs) {
    return AllReachedStep(logs, 1);
  })) << Output();
  v1::AgentMessage message;
  message.mutable_profile()->set_steps(2);
  agent->Send(0, message);
  const std::string folder = spec.checkpoint().directory() + "/profiles";
  const auto traces = [&folder] {
    std::vector<std::string> names;
    std::error_code none;
    for (const auto& file : std::filesystem::directory_iterator(folder, none)) {
      const std::string name = file.path().filename();
      if (name.starts_with("step-")) names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  };
  ASSERT_TRUE(agent->WaitFor([&](const std::vector<RankLog>&) { return traces().size() == 2; }))
      << Output();
  agent->SendToAll(Stop(v1::StopTrainers::ABORT));
  agent->Finish();
  const std::vector<std::string> names = traces();
  EXPECT_THAT(names[0], HasSubstr("-rank-00000.json"));
  EXPECT_THAT(names[1], HasSubstr("-rank-00001.json"));
  std::ostringstream text;
  text << std::ifstream(folder + "/" + names[1]).rdbuf();
  EXPECT_THAT(text.str(), HasSubstr("\"traceEvents\""));
  EXPECT_THAT(text.str(), HasSubstr("aten::"));
}

TEST_F(TrainerProcessTest, BadInputIsNamedAndNotTriedAgain) {
  v1::JobSpec spec = Job(1);
  spec.mutable_data()->set_sequence_length(1 << 20);
  v1::TrainerResult result = Failure(spec);
  EXPECT_THAT(result.message(), HasSubstr("tokens"));
  EXPECT_FALSE(result.retryable());
  EXPECT_FALSE(result.collateral());

  spec = Job(1);
  std::ofstream(Path("a-file")) << "where a folder should be";
  UseCheckpoints(&spec, Path("a-file") + "/checkpoints");
  result = Failure(spec);
  EXPECT_THAT(result.message(), HasSubstr("checkpoint.directory cannot be written by rank 0"));
  EXPECT_THAT(result.message(), HasSubstr(Path("a-file")));
  EXPECT_FALSE(result.retryable());

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

}  // namespace
}  // namespace ringleader::trainer
