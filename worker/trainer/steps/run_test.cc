// The course of an attempt: which steps run under which rate and plan, when it evaluates, saves and
// reports, and what it resumes.
#include "worker/trainer/steps/run.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/temp_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "patterns/pattern.h"
#include "worker/data/loader.h"
#include "worker/trainer/steps/step_profiler.h"
#include "worker/trainer/testing/run_test.h"
#include "worker/trainer/testing/tiny_files.h"

namespace ringleader::trainer {
namespace {

using ::testing::ElementsAre;
using testing::kTinySequence;
using testing::RecordingHost;
using testing::RunTest;
using testing::StepsOf;

TEST_F(RunTest, EveryStepHasTheRateOfItsPlaceInTheSchedule) {
  TrainingJob job = Job();
  job.schedule = {.decay = optim::LearningRateSchedule::Decay::kLinear,
                  .peak = 4e-3,
                  .minimum = 1e-3,
                  .warmup_steps = 2,
                  .total_steps = 6};
  RunAnew(job);
  const double expected[] = {2e-3, 4e-3, 4e-3, 3e-3, 2e-3, 1e-3};
  ASSERT_EQ(hosts_[0].steps.size(), 6u);
  for (int i = 0; i < 6; ++i) EXPECT_DOUBLE_EQ(hosts_[0].steps[i].learning_rate, expected[i]) << i;
}

TEST_F(RunTest, TheRateIsWhatMovesTheWeights) {
  TrainingJob job = Job();
  job.steps = 2;
  job.eval_every_steps = 1;
  job.schedule = {.peak = 0.0, .total_steps = 2};
  RunAnew(job);
  for (const EvalRecord& eval : hosts_[0].evals)
    EXPECT_EQ(eval.outcome.loss, hosts_[0].evals[0].outcome.loss);

  // That of the step, not the schedule's highest.
  job.schedule = {.peak = 4e-3, .warmup_steps = 1'000'000, .total_steps = 1'000'000};
  job.checkpoint_directory = Path("warm");
  RunAnew(job);
  for (const EvalRecord& eval : hosts_[0].evals) {
    EXPECT_NEAR(eval.outcome.loss, hosts_[0].evals[0].outcome.loss, 1e-5);
  }
}

TEST_F(RunTest, AStepsRecordCountsWhatAllRanksDid) {
  for (const auto& [context, data] : {std::pair{1, 1}, {2, 1}, {1, 2}}) {
    TrainingJob job = Job(context, data);
    job.steps = 2;
    job.checkpoint_directory = Path(std::to_string(context) + std::to_string(data));
    RunAnew(job);
    for (const RecordingHost& host : hosts_) {
      ASSERT_EQ(StepsOf(host.steps), (std::vector<uint64_t>{1, 2}));
      EXPECT_EQ(host.steps[0].tokens, 2u * kTinySequence);
      EXPECT_EQ(host.steps[0].plan_version, 1u);
      EXPECT_FALSE(host.steps[0].skipped);
      // Before anything is learnt, all of 257 values are as likely.
      EXPECT_NEAR(host.steps[0].loss, std::log(257.0), 0.1);
      EXPECT_EQ(Losses(host), Losses(hosts_[0]));
      EXPECT_EQ(host.steps[0].ring_bytes.sent > 0, context > 1);
      EXPECT_GE(host.steps[0].ring_bytes.whole, host.steps[0].ring_bytes.sent);
    }
  }
}

// What `ringctl report` divides a step's time into.
TEST_F(RunTest, ThePhasesOfAStepAreWhatItsTimeWentInto) {
  for (const int context : {1, 2}) {
    for (const auto pattern : {patterns::Pattern::kDense, patterns::Pattern::kVerticalSlash}) {
      TrainingJob job = Job(context);
      job.attention.pattern = pattern;
      job.steps = 3;
      job.checkpoint_directory =
          Path(absl::StrFormat("%d-%s", context, patterns::DefinitionOf(pattern).name));
      RunAnew(job);
      for (const RecordingHost& host : hosts_) {
        for (const StepRecord& step : host.steps) {
          const PhaseSeconds& phases = step.phases;
          EXPECT_GT(phases.data, 0);
          EXPECT_GT(phases.attention_forward, 0);
          EXPECT_GT(phases.attention_backward, 0);
          EXPECT_GT(phases.linear, 0);
          EXPECT_GT(phases.optimizer, 0);
          EXPECT_TRUE(phases.index > 0 || pattern == patterns::Pattern::kDense);
          EXPECT_EQ(phases.exposed_communication > 0, context > 1);
          EXPECT_EQ(phases.exposed_exchange > 0, context > 1);
          EXPECT_EQ(phases.exposed_offload, 0);
          // What held it up before: saved after the second, evaluated before the first.
          EXPECT_EQ(phases.checkpoint > 0, step.step == 3);
          EXPECT_EQ(phases.evaluation > 0, step.step == 1);
          EXPECT_GT(step.peak_memory_bytes, 1u << 20);
        }
      }
    }
  }
}

TEST_F(RunTest, AnotherSeedDrawsOtherWeights) {
  TrainingJob job = Job();
  job.steps = 1;
  RunAnew(job);
  const double loss = hosts_[0].evals.at(0).outcome.loss;  // before the first step
  job.seed = 2;
  job.checkpoint_directory = Path("another-seed");
  RunAnew(job);
  EXPECT_NE(hosts_[0].evals.at(0).outcome.loss, loss);
}

// Nothing is learnt, so that a loss tells which sequences it is of: the second step of two is the
// third and fourth of one each.
TEST_F(RunTest, EachStepTakesTheSequencesAfterThoseOfTheStepBefore) {
  TrainingJob job = Job();
  job.schedule = {.peak = 0.0, .total_steps = 4};
  job.eval_sequences = 0;
  job.steps = 2;
  RunAnew(job);
  const std::vector<double> pairs = Losses(hosts_[0]);
  job.global_batch = 1;
  job.steps = 4;
  job.checkpoint_directory = Path("single");
  RunAnew(job);
  const std::vector<double> single = Losses(hosts_[0]);
  for (size_t step = 0; step < 2; ++step) {
    EXPECT_NEAR(pairs.at(step), (single.at(2 * step) + single.at(2 * step + 1)) / 2, 1e-4);
  }
  EXPECT_GT(std::abs(single[1] - single[3]), 5e-4) << "one cannot be told from the other";
}

// By the power of two that each fits, where they do not attend to each other.
TEST_F(RunTest, DocumentsThatAreKeptApartAreCounted) {
  TrainingJob job = Job(2);
  job.steps = 1;
  RunAnew(job);
  EXPECT_TRUE(hosts_[0].steps.at(0).documents.empty());
  job.document_mask = true;
  job.checkpoint_directory = Path("apart");
  RunAnew(job);
  uint64_t most_tokens = 0;
  for (const auto& [tokens, count] : hosts_[0].steps.at(0).documents) most_tokens += tokens * count;
  EXPECT_GE(most_tokens, hosts_[0].steps[0].tokens);
  EXPECT_LT(most_tokens, 2 * hosts_[0].steps[0].tokens);
  EXPECT_EQ(hosts_[1].steps.at(0).documents, hosts_[0].steps[0].documents);
}

// The frequencies follow the length of the sequence, which no rank holds alone.
TEST_F(RunTest, RopeThatGrowsWithTheSequenceDoesSoOnAnyNumberOfRanks) {
  const auto losses = [&](int context, const std::string& scaling) {
    TrainingJob job = Job(context);
    job.checkpoint_directory = Path(scaling + std::to_string(context));
    nlohmann::json config = nlohmann::json::parse(std::ifstream(job.model_config));
    config["max_position_embeddings"] = kTinySequence / 2;
    config["rope_scaling"] = {{"rope_type", scaling}, {"factor", 64.0}};
    job.model_config = Path(scaling + ".json");
    std::ofstream(job.model_config) << config;
    RunAnew(job);
    return Losses(hosts_[0]);
  };
  const std::vector<double> alone = losses(1, "dynamic"), two = losses(2, "dynamic");
  const std::vector<double> plain = losses(1, "default");
  for (size_t i = 0; i < alone.size(); ++i) EXPECT_NEAR(two.at(i), alone[i], 1e-6 * alone[i]);
  EXPECT_GT(std::abs(plain.back() - alone.back()), 1e-5 * alone.back()) << "it makes no difference";
}

// Double rings of any window, as parallelism.ring_window makes them, and no ring at all.
TEST_F(RunTest, RingsOfAnyWindowTrainAlike) {
  RunAnew(Job());
  const std::vector<double> alone = Losses(hosts_[0]);
  for (const int window : {1, 2, 4}) {
    SCOPED_TRACE(window);
    TrainingJob job = Job(/*context=*/4);
    job.checkpoint_directory = Path("window" + std::to_string(window));
    job.attention.ring = job.plan.ring = {ring::RingKind::kHierarchical, window, 4 / window};
    RunAnew(job);
    const std::vector<double> losses = Losses(hosts_[0]);
    ASSERT_EQ(losses.size(), alone.size());
    for (size_t i = 0; i < alone.size(); ++i) EXPECT_NEAR(losses[i], alone[i], 1e-6 * alone[i]);
  }
}

TEST_F(RunTest, EvaluatesBeforeTheFirstStepEverySoOftenAndAtTheEnd) {
  TrainingJob job = Job(2);
  job.steps = 5;
  job.eval_every_steps = 2;
  RunAnew(job);
  EXPECT_THAT(StepsOf(hosts_[0].evals), ElementsAre(0, 2, 4, 5));
  EXPECT_TRUE(hosts_[1].evals.empty());
  EXPECT_GT(hosts_[0].evals[0].outcome.tokens, kTinySequence);
  EXPECT_LE(hosts_[0].evals[0].outcome.tokens, 2u * kTinySequence);
  // What an evaluation took stands in the step after it, and what it visited in none.
  const std::vector<StepRecord>& steps = hosts_[0].steps;
  for (const StepRecord& step : steps) {
    EXPECT_EQ(step.phases.evaluation > 0, step.step == 1 || step.step == 3 || step.step == 5)
        << step.step;
    EXPECT_EQ(step.layers[0].tiles_per_ring_step, steps[1].layers[0].tiles_per_ring_step);
  }

  job.eval_every_steps = 0;
  job.checkpoint_directory = Path("seldom");
  RunAnew(job);
  EXPECT_THAT(StepsOf(hosts_[0].evals), ElementsAre(0, 5));
  job.eval_sequences = 0;
  job.checkpoint_directory = Path("never");
  RunAnew(job);
  EXPECT_TRUE(hosts_[0].evals.empty());
}

TEST_F(RunTest, HeldOutSequencesCountOnceOnAnyNumberOfGroups) {
  TrainingJob job = Job();
  job.steps = 1;
  job.eval_sequences = 3;
  RunAnew(job);
  const EvalRecord alone = hosts_[0].evals[0];
  job = Job(1, 2);
  job.steps = 1;
  job.eval_sequences = 3;
  job.checkpoint_directory = Path("two");
  RunAnew(job);
  EXPECT_EQ(hosts_[0].evals[0].outcome.tokens, alone.outcome.tokens);
  EXPECT_NEAR(hosts_[0].evals[0].outcome.loss, alone.outcome.loss, 1e-6 * alone.outcome.loss);
  // More than there are: all of them, each token with a label once.
  job.eval_sequences = 1'000'000;
  job.checkpoint_directory = Path("all");
  RunAnew(job);
  const auto held_out = data::Loader::Open(job.eval_data, kTinySequence, job.seed, 257);
  ASSERT_TRUE(held_out.ok()) << held_out.status();
  uint64_t labels = 0;
  for (uint64_t i = 0; i < held_out->sequences(); ++i) {
    const data::Sample sequence = held_out->InOrder(i);
    for (const int64_t label : held_out->Read({&sequence, 1}, {.tokens = kTinySequence}).labels) {
      labels += label != data::kIgnoreLabel;
    }
  }
  EXPECT_EQ(hosts_[0].evals[0].outcome.tokens, labels);
}

// One step over everything that is held out, which teaches nothing, has the held-out loss.
TEST_F(RunTest, AStepsLossIsTheMeanOverTheTokensWithALabel) {
  TrainingJob job = Job();
  job.train_data = job.eval_data;
  const auto data = data::Loader::Open(job.train_data, kTinySequence, job.seed, 257);
  ASSERT_TRUE(data.ok()) << data.status();
  job.steps = 1;
  job.schedule = {.peak = 0.0, .total_steps = 1};
  job.global_batch = static_cast<uint32_t>(data->sequences());
  job.eval_sequences = data->sequences();
  RunAnew(job);
  const double held_out = hosts_[0].evals.at(0).outcome.loss;
  EXPECT_NEAR(hosts_[0].steps.at(0).loss, held_out, 1e-6 * held_out);
}

TEST_F(RunTest, SavesEverySoOftenAndAtTheEnd) {
  TrainingJob job = Job(2);
  job.steps = 5;
  job.keep_last = 2;
  const absl::Time start = absl::Now();
  RunAnew(job);
  ASSERT_THAT(StepsOf(hosts_[0].checkpoints), ElementsAre(2, 4, 5));
  EXPECT_TRUE(hosts_[1].checkpoints.empty());
  const RecordingHost::Checkpoint& last = hosts_[0].checkpoints.back();
  EXPECT_EQ(last.path, job.checkpoint_directory + "/step-0000000005");
  uint64_t bytes = 0;
  for (const auto& file : std::filesystem::directory_iterator(last.path)) bytes += file.file_size();
  EXPECT_EQ(last.bytes, bytes);
  for (const RecordingHost::Checkpoint& saved : hosts_[0].checkpoints) {
    EXPECT_GT(saved.seconds, 0);
    EXPECT_LT(saved.seconds, absl::ToDoubleSeconds(absl::Now() - start));
  }
  EXPECT_TRUE(std::filesystem::exists(hosts_[0].checkpoints[1].path)) << "keep_last is 2";
  EXPECT_FALSE(std::filesystem::exists(hosts_[0].checkpoints[0].path));
  EXPECT_EQ(hosts_[0].model, job.checkpoint_directory + "/model");
  EXPECT_EQ(hosts_[1].model, "");

  job.checkpoint_every_steps = 0;
  job.checkpoint_directory = Path("at-the-end");
  RunAnew(job);
  EXPECT_THAT(StepsOf(hosts_[0].checkpoints), ElementsAre(5));
}

TEST_F(RunTest, AStopSavesWhatIsNotSavedYet) {
  TrainingJob job = Job(2);
  job.steps = 50;
  for (const uint64_t at : {3, 4}) {
    job.checkpoint_directory = Path(std::to_string(at));
    // Asked of one rank alone, and not the first.
    NewHosts(job)[1].on_step = [at](RecordingHost& host, const StepRecord& record) {
      if (record.step == at) host.stop = true;
    };
    Run(job, Outcome::kStopped);
    for (const RecordingHost& host : hosts_) EXPECT_EQ(host.steps.size(), at);
    const std::vector<uint64_t> saved = StepsOf(hosts_[0].checkpoints);
    EXPECT_EQ(saved, at == 3 ? (std::vector<uint64_t>{2, 3}) : (std::vector<uint64_t>{2, 4}));
    EXPECT_EQ(hosts_[0].model, "");
  }
}

TEST_F(RunTest, AStopBeforeTheFirstStepSavesNothing) {
  const TrainingJob job = Job();
  NewHosts(job)[0].stop = true;
  Run(job, Outcome::kStopped);
  EXPECT_TRUE(hosts_[0].steps.empty());
  EXPECT_TRUE(hosts_[0].checkpoints.empty());
}

TEST_F(RunTest, TellsWhereItIs) {
  TrainingJob job = Job();
  job.steps = 1;
  RunAnew(job);
  const auto at = [&](uint64_t step, const std::string& phase) {
    return std::find(hosts_[0].places.begin(), hosts_[0].places.end(), std::pair(step, phase));
  };
  const auto order = {at(0, "loading the model"),
                      at(0, "opening the data"),
                      at(0, "looking for a checkpoint"),
                      at(0, "evaluation"),
                      at(1, "data"),
                      at(1, "forward and backward"),
                      at(1, "optimizer"),
                      at(1, "checkpoint"),
                      at(1, "evaluation"),
                      at(1, "finishing the checkpoint"),
                      at(1, "exporting the model")};
  for (const auto place : order) EXPECT_NE(place, hosts_[0].places.end());
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

// A trace has its name once it is whole: before the report of its last step, and not of an earlier
// one.
TEST_F(RunTest, ATraceHoldsAsManyStepsAsWereAskedFor) {
  TrainingJob job = Job();
  job.eval_sequences = 0;
  const std::string trace = job.checkpoint_directory + "/profiles/step-0000000003-rank-00000.json";
  std::vector<bool> is_there;
  NewHosts(job)[0].on_step = [&](RecordingHost& host, const StepRecord& record) {
    if (record.step == 2) host.profile_steps = 2;
    is_there.push_back(std::filesystem::exists(trace));
  };
  Run(job);
  EXPECT_THAT(is_there, ElementsAre(false, false, false, true, true, true));
}

int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// `ringctl logs` shows it: once, whatever the number of ranks.
TEST_F(RunTest, TheFirstRankAloneSaysWhatIsTrainedAndHowItGoes) {
  TrainingJob job = Job(2);
  job.steps = 3;
  job.eval_every_steps = 2;
  job.keep_last = 5;
  ::testing::internal::CaptureStdout();
  RunAnew(job);
  std::string said = ::testing::internal::GetCapturedStdout();
  for (const auto& [key, value] : std::vector<std::pair<std::string, std::string>>{
           {"job", "tiny, attempt 1"},
           {"sequence", absl::StrFormat("%d tokens", kTinySequence)},
           {"a step", "2 sequences"},
           {"packed documents", "not kept apart (data.document_mask: false)"},
           {"a query may see", "causal"},
           {"predicted", "the next token"},
           {"ranks", "2 = 2 context x 1 data"},
           {"ring", "2 inner x 1 outer, stripe 64"},
           {"steps", "3, learning rate 0.003, warm-up 2"},
           {"recompute", ""}}) {
    const std::string row = value.empty() ? absl::StrFormat("| %-20s | ", key)
                                          : absl::StrFormat("| %-20s | %-56s |\n", key, value);
    EXPECT_EQ(Count(said, row), 1) << row << said;
  }
  EXPECT_EQ(Count(said, "| heads "), 0);
  for (const StepRecord& step : hosts_[0].steps) {
    const PhaseSeconds& phases = step.phases;
    const std::string line = absl::StrFormat(
        "step %5d/3  loss %.4f  norm %.3f  lr %.2e  %.2f s  %.0f tok/s  (index %.2f, "
        "attention %.2f + %.2f, linear %.2f, waiting %.2f, optimizer %.2f)\n",
        step.step, step.loss, step.gradient_norm, step.learning_rate, step.step_seconds,
        2 * kTinySequence / step.step_seconds, phases.index, phases.attention_forward,
        phases.attention_backward, phases.linear, phases.exposed_communication, phases.optimizer);
    EXPECT_EQ(Count(said, line), 1) << line << said;
  }
  EXPECT_EQ(Count(said, "SKIPPED"), 0);
  for (const EvalRecord& eval : hosts_[0].evals) {
    EXPECT_EQ(Count(said, absl::StrFormat("step %5d/3  held-out loss %.4f\n", eval.step,
                                          eval.outcome.loss)),
              1)
        << said;
  }

  EXPECT_EQ(Count(said, " sequences of 512 tokens; the last "), 2) << said;

  // An attempt that goes on where one ended says so.
  job.steps = 4;
  ::testing::internal::CaptureStdout();
  RunAnew(job);
  said = ::testing::internal::GetCapturedStdout();
  const std::string last = job.checkpoint_directory + "/step-0000000003";
  EXPECT_EQ(Count(said, "resuming from " + last + "\n"), 1) << said;
  EXPECT_EQ(Count(said, "passed over"), 0);
  std::filesystem::remove(last + "/shard-00001-of-00002.bin");
  std::filesystem::remove_all(job.checkpoint_directory + "/step-0000000004");
  job.steps = 5;
  ::testing::internal::CaptureStdout();
  RunAnew(job);
  said = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(Count(said, "passed over: "), 1) << said;
  EXPECT_EQ(Count(said, "resuming from " + job.checkpoint_directory + "/step-0000000002\n"), 1);
}

TEST_F(RunTest, TheExportKeepsTheTokenizerThatWasThereAtTheStart) {
  TrainingJob job = Job(2);
  job.steps = 1;
  job.export_bf16 = true;
  std::ofstream(Path("tokenizer.json")) << R"({"version": "1.0"})";
  std::ofstream(Path("generation_config.json")) << "{}";
  NewHosts(job)[0].on_step = [&](RecordingHost&, const StepRecord&) {
    std::filesystem::remove(Path("tokenizer.json"));
  };
  Run(job);
  const std::filesystem::path model = hosts_[0].model;
  std::stringstream tokenizer;
  tokenizer << std::ifstream(model / "tokenizer.json").rdbuf();
  EXPECT_EQ(tokenizer.str(), R"({"version": "1.0"})");
  EXPECT_TRUE(std::filesystem::exists(model / "generation_config.json"));
  EXPECT_FALSE(std::filesystem::exists(model / "job.yaml"));
  EXPECT_EQ(nlohmann::json::parse(std::ifstream(model / "config.json"))["torch_dtype"], "bfloat16");

  // What could not go with the export is said before training, not after it.
  std::filesystem::create_symlink(Path("nowhere"), Path("tokenizer.json"));
  EXPECT_THAT(std::string(Failure(Job()).message()), ::testing::HasSubstr("tokenizer.json"));
  EXPECT_TRUE(hosts_[0].steps.empty());
}

TEST(StepProfilerTest, SaysNothingOfTracesThatNobodyAskedFor) {
  const TempDir dir;
  ::testing::internal::CaptureStdout();
  {
    StepProfiler profiler(dir.path().string(), 3, false);
    profiler.StepDone(1);
    profiler.Start(1, 2);
    for (const uint64_t step : {2, 3, 4}) profiler.StepDone(step);
  }
  const std::string said = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(said, "trace: " + dir.File("step-0000000002-rank-00003.json") + "\n");
}

// Whoever asks again has the steps so far, and then the others.
TEST(StepProfilerTest, ATraceEndsWhereTheNextBeginsOrTrainingEnds) {
  const TempDir dir;
  ::testing::internal::CaptureStdout();
  {
    StepProfiler profiler(dir.path().string(), 0, false);
    profiler.Start(1, 5);
    profiler.StepDone(2);
    profiler.Start(2, 5);
    profiler.StepDone(3);
  }
  const std::string said = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(said, "trace: " + dir.File("step-0000000002-rank-00000.json") +
                      "\ntrace: " + dir.File("step-0000000003-rank-00000.json") + "\n");
}

}  // namespace
}  // namespace ringleader::trainer
