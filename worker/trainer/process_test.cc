// Whole attempts: real ringleader-trainer processes on a tiny model, under a worker played by the
// test.
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "base/files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/pack/pack_folder.h"
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
  constexpr uint64_t kSteps = 120;  // enough to be stopped before the last
  v1::JobSpec spec = Job(2);
  spec.mutable_training()->set_steps(kSteps);
  const std::vector<double> undisturbed = Losses(RunToEnd(spec)[0]);

  UseCheckpoints(&spec, Path("stopped"));
  const std::vector<RankLog> stopped = StopEarly(spec);
  const uint64_t done = stopped[0].steps.back().step();
  EXPECT_EQ(stopped[0].checkpoints.back().step(), done);
  std::filesystem::copy(Path("stopped"), Path("other"), std::filesystem::copy_options::recursive);

  std::vector<double> losses = Losses(stopped[0]);
  const RankLog resumed = RunToEnd(spec)[0];
  EXPECT_EQ(resumed.steps.front().step(), done + 1);
  for (double loss : Losses(resumed)) losses.push_back(loss);
  EXPECT_EQ(losses, undisturbed);

  spec = Job(1);
  spec.mutable_training()->set_steps(kSteps);
  UseCheckpoints(&spec, Path("other"));
  const std::vector<double> other = Losses(RunToEnd(spec)[0]);
  ASSERT_EQ(other.size(), kSteps - done);
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

TEST_F(TrainerProcessTest, AStopBeforeTheRanksHaveMetIsNoFailure) {
  const auto agent = Start(Job(2));
  ASSERT_EQ(kill(agent->pid(1), SIGSTOP), 0);
  ASSERT_TRUE(agent->WaitFor([](const std::vector<RankLog>& logs) {
    return !logs[0].address.empty();
  })) << Output();
  agent->Send(0, Stop(v1::StopTrainers::CHECKPOINT));
  std::optional<v1::TrainerResult> result;
  ASSERT_TRUE(agent->WaitFor([&](const std::vector<RankLog>& logs) {
    result = logs[0].result;
    return result.has_value();
  })) << Output();
  EXPECT_EQ(result->outcome(), TrainerExited::STOPPED);
}

TEST_F(TrainerProcessTest, SigtermIsACheckpointAndAnOrderlyEnd) {
  v1::JobSpec spec = Job(2);
  spec.mutable_training()->set_steps(1'000'000);
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

TEST_F(TrainerProcessTest, PlansTakeEffectAtOneStepOnAllRanks) {
  v1::JobSpec spec = Job(2);
  spec.mutable_training()->set_steps(1'000'000);
  auto agent = Start(spec);
  v1::AgentMessage message;
  v1::StepPlan* plan = message.mutable_plan();
  *plan = TinyPlan(spec);
  plan->set_version(2);
  plan->set_effective_step(4);
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
    EXPECT_TRUE(step.plan_version() != 2 || step.step() >= 4u) << step.step();
  }
}

TEST_F(TrainerProcessTest, EveryRankTracesTheStepsThatItIsAskedFor) {
  v1::JobSpec spec = Job(2);
  spec.mutable_training()->set_steps(1'000'000);
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

}  // namespace
}  // namespace ringleader::trainer
