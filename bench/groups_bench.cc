// Steps of a job of several data-parallel groups on one GPU (or its CPU, by the job file), which
// plays the groups in turn: the trainer's engine and data, dealt as its ranks would deal.
//
//   groups_bench JOB.yaml [--ways in_order,by_cost,tuned] [--steps 12] [--warm-up 3]
//       [--measured FILE] [--measure-seconds 10]
//
// Each way trains the same samples: in_order deals sample i to group i mod groups, and groups meet
// at each micro-batch (data.dealing: in_order); by_cost deals by the weights of the plan, and
// groups meet once a step; tuned moves attention to the job's attention.balance beside that. A
// group's time, forward and backward, is taken on the device between its meetings. A step takes
// what the slowest group takes from meeting to meeting, and the optimizer; that groups exchange
// gradients is not in it. Where several ways are compared nothing is learned, so that all see the
// same weights; one way alone learns by the job's schedule and scores the held-out data at the end.
//
// What the steps of the first way's warm-up visited corrects the weights once, as reports correct
// them while a job runs. Attention is measured first and kept in --measured, in the form of
// `ringctl latency -o json`, unless the file has it. Prints a line of JSON for each counted step.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/process/config.h"
#include "base/status_macros.h"
#include "bench/in_process.h"
#include "bench/planned_job.h"
#include "patterns/pattern.h"
#include "worker/comm/testing/local_communicator.h"
#include "worker/data/loader.h"
#include "worker/trainer/engine/step_engine.h"
#include "worker/trainer/steps/deal/dealt_step.h"
#include "worker/trainer/steps/deal/group_moves.h"
#include "worker/trainer/steps/eval_sums.h"

namespace ringleader::bench {
namespace {

using trainer::EngineDevice;
using trainer::StepEngine;
using trainer::TrainingJob;

struct Flags {
  std::string job;
  std::vector<std::string> ways = {"in_order", "by_cost"};
  int steps = 12, warm_up = 3;
  std::string measured = "measured.json";
  double measure_seconds = 10;
};

struct GroupsStep {
  double loss = 0, gradient_norm = 0;
  double seconds = 0;                 // of the slowest groups between meetings, and the optimizer
  std::vector<double> group_seconds;  // what each group computes
  double index_seconds = 0;           // of all groups
  double predicted_imbalance = 0;     // Dealing::Imbalance()
  uint64_t tokens = 0;
  size_t micro_batches = 0;
  int64_t padding = 0;
  VisitedByLength visited;  // empty where that is known before the data
};

class GroupsJob {
 public:
  // `job` as rank 0 of all groups' ranks has it; `alone` as the one rank has that plays them.
  GroupsJob(const TrainingJob& job, const TrainingJob& alone, StepEngine& engine,
            const data::Loader& loader)
      : job_(job), alone_(alone), engine_(engine), loader_(loader) {}

  absl::Status SetWay(const std::string& way) {
    job_.deals_in_order = way == "in_order";
    is_tuned_ = way == "tuned";
    patterns::AttentionOptions options = alone_.attention;
    if (!is_tuned_) options.balance = {};
    return engine_.device().SetAttention(options);
  }

  void SetWeights(const balance::SampleWeights& weights) { job_.plan.sample_weights = weights; }
  absl::StatusOr<GroupsStep> Train(uint64_t step, double learning_rate);

 private:
  absl::StatusOr<data::LocalSequence> Read(const balance::MicroBatch& batch,
                                           std::span<const data::Sample> samples) const;
  // Returns the seconds from meeting to meeting of the group's micro-batches.
  absl::StatusOr<std::vector<double>> TrainGroup(const std::vector<balance::MicroBatch>& mine,
                                                 std::span<const data::Sample> samples,
                                                 const std::vector<float>& moves, bool is_last);

  TrainingJob job_;
  const TrainingJob& alone_;
  StepEngine& engine_;
  const data::Loader& loader_;
  bool is_tuned_ = false;
};

absl::StatusOr<data::LocalSequence> GroupsJob::Read(const balance::MicroBatch& batch,
                                                    std::span<const data::Sample> samples) const {
  return loader_.Read(trainer::SamplesOf(batch, samples), {.kind = alone_.plan.layout,
                                                           .ranks = 1,
                                                           .rank = 0,
                                                           .stripe = alone_.plan.stripe,
                                                           .tokens = batch.padded});
}

absl::StatusOr<std::vector<double>> GroupsJob::TrainGroup(
    const std::vector<balance::MicroBatch>& mine, std::span<const data::Sample> samples,
    const std::vector<float>& moves, bool is_last) {
  std::vector<data::LocalSequence> sequences;
  for (const balance::MicroBatch& batch : mine) {
    ASSIGN_OR_RETURN(sequences.emplace_back(), Read(batch, samples));
  }
  EngineDevice& device = engine_.device();
  std::vector<double> seconds;
  for (size_t i = 0; i < mine.size(); ++i) {
    const bool is_end = i + 1 == mine.size();
    if (i == 0 || job_.deals_in_order) device.Begin(EngineDevice::Interval::kModel);
    RETURN_IF_ERROR(engine_.ForwardBackward(sequences[i], is_last && is_end, moves[i]));
    if (!is_end && !job_.deals_in_order) continue;
    device.End(EngineDevice::Interval::kModel);
    seconds.push_back(device.TakeSeconds(EngineDevice::Interval::kModel));
  }
  return seconds;
}

absl::StatusOr<GroupsStep> GroupsJob::Train(uint64_t step, double learning_rate) {
  GroupsStep result;
  std::vector<data::Sample> samples;
  std::vector<uint64_t> tokens;
  for (uint32_t i = 0; i < job_.global_batch; ++i) {
    samples.push_back(loader_.Shuffled((step - 1) * job_.global_batch + i));
    tokens.push_back(samples.back().tokens);
    result.tokens += tokens.back();
  }
  const balance::SampleWeights& weights = job_.plan.sample_weights;
  const balance::Dealing dealing =
      trainer::DealStep(job_, job_.plan, samples, weights, /*group_permille=*/{});
  result.predicted_imbalance = dealing.Imbalance();
  result.micro_batches = dealing.MicroBatches();
  result.padding = dealing.PaddingTokens();
  engine_.BeginStep(step);
  std::vector<double> slowest;  // by meeting
  for (size_t group = 0; group < dealing.groups.size(); ++group) {
    const std::vector<balance::MicroBatch>& mine = dealing.groups[group];
    std::vector<float> moves(mine.size(), 1.0f);
    if (is_tuned_) {
      moves = trainer::GroupMoves(dealing, tokens, weights, group, /*permille=*/1000,
                                  job_.attention.balance.anchor,
                                  trainer::WorthMoving(job_.attention.pattern), /*once=*/true);
    }
    ASSIGN_OR_RETURN(
        const std::vector<double> seconds,
        TrainGroup(mine, samples, moves, /*is_last=*/group + 1 == dealing.groups.size()));
    slowest.resize(std::max(slowest.size(), seconds.size()));
    for (size_t i = 0; i < seconds.size(); ++i) slowest[i] = std::max(slowest[i], seconds[i]);
    result.group_seconds.push_back(std::accumulate(seconds.begin(), seconds.end(), 0.0));
  }
  ASSIGN_OR_RETURN(const trainer::StepUpdate update, engine_.Update(learning_rate));
  ASSIGN_OR_RETURN(const trainer::EngineStats stats, engine_.TakeStats());
  if (update.sum.tokens == 0) return absl::FailedPreconditionError("a step without labels");
  result.loss = update.sum.loss / update.sum.tokens;
  result.gradient_norm = update.gradient_norm;
  result.index_seconds = stats.phases.index;
  auto tiles = patterns::DefinitionOf(job_.attention.pattern).goes_by_distance()
                   ? stats.micro_batches.end()
                   : stats.micro_batches.begin();
  for (const std::vector<balance::MicroBatch>& mine : dealing.groups) {
    for (const balance::MicroBatch& batch : mine) {
      if (tiles == stats.micro_batches.end()) break;
      attention::VisitedTiles& bin =
          result.visited[weights.BinOf(static_cast<uint64_t>(batch.padded))];
      bin.visited += tiles->visited;
      bin.causal += tiles->causal;
      ++tiles;
    }
  }
  result.seconds = std::accumulate(slowest.begin(), slowest.end(), 0.0) + stats.phases.optimizer;
  return result;
}

void Print(const std::string& way, uint64_t step, const GroupsStep& of) {
  const double all = std::accumulate(of.group_seconds.begin(), of.group_seconds.end(), 0.0);
  const double most = *std::max_element(of.group_seconds.begin(), of.group_seconds.end());
  const auto groups = static_cast<double>(of.group_seconds.size());
  std::printf(
      "{\"way\": \"%s\", \"step\": %d, \"step_seconds\": %.6f, \"group_seconds\": [%s], "
      "\"group_imbalance\": %.5f, \"dealt_imbalance\": %.5f, \"index_seconds\": %.6f, "
      "\"micro_batches\": %d, \"tokens\": %d, \"padding_tokens\": %d, \"loss\": %.7f, "
      "\"gradient_norm\": %.7f}\n",
      way.c_str(), static_cast<int>(step), of.seconds,
      absl::StrJoin(of.group_seconds, ", ").c_str(), most * groups / all, of.predicted_imbalance,
      of.index_seconds, static_cast<int>(of.micro_batches), static_cast<int>(of.tokens),
      static_cast<int>(of.padding), of.loss, of.gradient_norm);
  std::fflush(stdout);
}

// Scores the held-out samples, each by itself, and prints their mean loss.
absl::Status Evaluate(const TrainingJob& alone, StepEngine& engine, const std::string& way) {
  ASSIGN_OR_RETURN(
      const data::Loader eval,
      data::Loader::Open(alone.eval_data, alone.sequence_length, alone.seed,
                         static_cast<uint64_t>(engine.config().vocab_size), alone.batching));
  trainer::EvalSums sums(eval.tasks());
  std::vector<data::Sample> samples;
  const uint64_t count = std::min<uint64_t>(alone.eval_sequences, eval.sequences());
  for (uint64_t i = 0; i < count; ++i) samples.push_back(eval.InOrder(i));
  const balance::Dealing dealing = trainer::DealStep(alone, alone.plan, samples, {}, {});
  for (const balance::MicroBatch& batch : dealing.groups.front()) {
    const data::LocalSequence sequence =
        eval.Read(trainer::SamplesOf(batch, samples), {.kind = alone.plan.layout,
                                                       .ranks = 1,
                                                       .rank = 0,
                                                       .stripe = alone.plan.stripe,
                                                       .tokens = batch.padded});
    ASSIGN_OR_RETURN(const trainer::RankScores scores, engine.Score(sequence));
    sums.Add(sequence, scores);
  }
  std::printf("{\"way\": \"%s\", \"held_out_loss\": %.7f}\n", way.c_str(), sums.Outcome().loss);
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags) {
  ASSIGN_OR_RETURN(TrainingJob job, LoadPlannedJob(flags.job, flags.measured));
  if (job.context != 1 || job.data < 2 || !job.batching.samples) {
    return absl::InvalidArgumentError(
        "groups_bench plays groups of one rank each that share a step's samples: set "
        "parallelism.context: 1, parallelism.data: 2 or more and data.batching: samples");
  }
  job.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  job.attention.threads = job.threads;
  // What the engine refers to is left to the end of the process with it, as a trainer leaves its
  // own.
  auto& alone = *new TrainingJob(job);
  alone.data = alone.world_size = alone.ranks_per_node = 1;
  const auto& world = *new auto(comm::testing::LocalCommunicators(1));
  auto& host = *new QuietHost;
  ASSIGN_OR_RETURN(std::unique_ptr<StepEngine> created,
                   StepEngine::Create(alone, *world.front(), host));
  StepEngine* const engine = created.release();
  PrintSettings(*engine);
  ASSIGN_OR_RETURN(const bool is_new,
                   MeasureOnce(flags.job, alone, flags.measured, flags.measure_seconds, *engine));
  if (is_new) {
    ASSIGN_OR_RETURN(const TrainingJob weighed, LoadPlannedJob(flags.job, flags.measured));
    job.plan.sample_weights = weighed.plan.sample_weights;
  }
  ASSIGN_OR_RETURN(
      const data::Loader loader,
      data::Loader::Open(job.train_data, job.sequence_length, job.seed,
                         static_cast<uint64_t>(engine->config().vocab_size), job.batching));
  GroupsJob groups(job, alone, *engine, loader);
  bool is_reweighed = false;
  const bool learns = flags.ways.size() == 1;
  for (const std::string& way : flags.ways) {
    RETURN_IF_ERROR(groups.SetWay(way));
    std::vector<VisitedByLength> visited;
    for (uint64_t step = 1; step <= static_cast<uint64_t>(flags.warm_up + flags.steps); ++step) {
      const double rate = learns ? job.schedule.At(static_cast<int64_t>(step) - 1) : 0.0;
      ASSIGN_OR_RETURN(const GroupsStep result, groups.Train(step, rate));
      if (step > static_cast<uint64_t>(flags.warm_up)) Print(way, step, result);
      visited.push_back(result.visited);
      if (step != static_cast<uint64_t>(flags.warm_up) || is_reweighed) continue;
      ASSIGN_OR_RETURN(const balance::SampleWeights weights,
                       Reweighed(flags.job, flags.measured, visited));
      groups.SetWeights(weights);
      is_reweighed = true;
    }
    if (learns && !alone.eval_data.empty()) RETURN_IF_ERROR(Evaluate(alone, *engine, way));
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Steps of several data-parallel groups, which one rank plays in turn.");
  app.add_option("job", flags.job, "job.yaml")->required();
  app.add_option("--ways", flags.ways, "in_order, by_cost, tuned")
      ->delimiter(',')
      ->check(CLI::IsMember({"in_order", "by_cost", "tuned"}));
  app.add_option("--steps", flags.steps, "counted steps of each way")->check(CLI::PositiveNumber);
  app.add_option("--warm-up", flags.warm_up, "steps before them")->check(CLI::NonNegativeNumber);
  app.add_option("--measured", flags.measured, "the latency table; written where it has no rows");
  app.add_option("--measure-seconds", flags.measure_seconds, "for measuring attention");
  if (const std::optional<int> code = ParseArguments(app, argc, argv)) return *code;
  if (const absl::Status status = Run(flags); !status.ok()) {
    std::cerr << "groups_bench: " << status.message() << "\n";
    std::_Exit(1);
  }
  std::fflush(stdout);
  std::_Exit(0);
}

}  // namespace
}  // namespace ringleader::bench

int main(int argc, char** argv) {
  return ringleader::bench::Main(argc, argv);
}
