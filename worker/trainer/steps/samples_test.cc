// Jobs whose documents are samples: whoever trains them, in whatever micro-batches, trains the
// same.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/testing/temp_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/pack/pack_folder.h"
#include "worker/trainer/testing/attempt_in_process.h"

namespace ringleader::trainer {
namespace {

using ::testing::HasSubstr;
using testing::RecordingHost;

class SamplesJobTest : public ::testing::Test {
 protected:
  // Documents of 12 to 500 bytes, and one of 1,300 to train on.
  SamplesJobTest() {
    WriteDocuments("train", 24, {1300});
    WriteDocuments("eval", 7, {});
  }

  void WriteDocuments(const std::string& name, int count, std::vector<int> lengths) {
    for (int i = 0; i < count; ++i) lengths.push_back(12 + i * i * 488 / (count * count));
    const std::string text = directory_.File("text-" + name);
    std::filesystem::create_directories(text);
    for (size_t i = 0; i < lengths.size(); ++i) {
      std::ofstream out(text + "/" + std::to_string(100 + i));
      for (size_t b = 0; b < static_cast<size_t>(lengths[i]); ++b) {
        out << static_cast<char>('a' + (b * (i + 3) + b / 7) % 26);
      }
    }
    data::PackOptions pack;
    pack.paths = {text};
    pack.output = directory_.File(name);
    pack.eval_share = 0;
    EXPECT_TRUE(data::Pack(pack).ok());
  }

  TrainingJob Job(int context, int data, patterns::Pattern pattern = patterns::Pattern::kDense) {
    TrainingJob job = testing::TinyTrainingJob(directory_.path().string(), context, data);
    job.train_data = directory_.File("train/train");
    job.eval_data = directory_.File("eval/train");
    job.batching = {.samples = true, .overlong = data::Overlong::kSplit};
    job.global_batch = 6;
    job.steps = 3;
    job.eval_sequences = 5;
    job.attention.pattern = pattern;
    job.attention.window = 100;
    job.attention.block_size = 64;
    job.attention.topk_blocks = 1;
    if (pattern == patterns::Pattern::kKeyGroups || pattern == patterns::Pattern::kAdaSpa) {
      job.attention.density = 0.3;
    }
    job.attention.adapt_heads = pattern == patterns::Pattern::kAdaSpa;
    job.attention.budget = {
        .vertical_mass = 0.7, .slash_mass = 0.7, .max_verticals = 16, .max_slashes = 3};
    job.checkpoint_directory = directory_.File("checkpoints-" + std::to_string(++jobs_));
    return job;
  }
  absl::Status Run(const TrainingJob& job, uint64_t stop_after = 0) {
    hosts_ = std::vector<RecordingHost>(job.world_size);
    for (RecordingHost& host : hosts_) {
      host.on_step = [stop_after](RecordingHost& self, const StepRecord& record) {
        self.stop = record.step == stop_after;
      };
    }
    for (const auto& outcome : testing::RunRanks(job, hosts_)) {
      if (!outcome.ok()) return outcome.status();
    }
    return absl::OkStatus();
  }
  std::vector<double> Losses() const {
    std::vector<double> losses;
    for (const StepRecord& step : hosts_[0].steps) losses.push_back(step.loss);
    return losses;
  }

  TempDir directory_;
  int jobs_ = 0;
  std::vector<RecordingHost> hosts_;
};

class DealingOfPatternTest : public SamplesJobTest,
                             public ::testing::WithParamInterface<patterns::Pattern> {};

// Losses, gradient norms, tokens and held-out losses are those of one rank.
TEST_P(DealingOfPatternTest, AnyDealingTrainsWhatOneRankTrains) {
  ASSERT_EQ(Run(Job(1, 1, GetParam())), absl::OkStatus());
  const std::vector<StepRecord> alone = hosts_[0].steps;
  const std::vector<EvalRecord> evals = hosts_[0].evals;
  ASSERT_EQ(alone.size(), 3u);
  // Short ones weigh nothing; long ones do; all weigh alike.
  const std::vector<std::vector<balance::SampleWeight>> weights = {
      {}, {{400, 0.001}, {512, 100}}, {{1, 5}, {512, 5}}};
  const std::pair<int, int> shapes[] = {{2, 1}, {1, 2}, {2, 2}};  // context, data
  for (size_t i = 0; i < weights.size(); ++i) {
    TrainingJob job = Job(shapes[i].first, shapes[i].second, GetParam());
    job.plan.sample_weights = *balance::SampleWeights::Create(weights[i]);
    ASSERT_EQ(Run(job), absl::OkStatus());
    for (size_t step = 0; step < alone.size(); ++step) {
      const StepRecord& record = hosts_[0].steps.at(step);
      EXPECT_EQ(record.tokens, alone[step].tokens);
      EXPECT_NEAR(record.loss, alone[step].loss, 1e-5 * alone[step].loss) << i << " " << step;
      EXPECT_NEAR(record.gradient_norm, alone[step].gradient_norm, 1e-5 * alone[step].gradient_norm)
          << i << " " << step;
      EXPECT_EQ(hosts_.back().steps.at(step).padding_tokens, record.padding_tokens);
    }
    for (size_t e = 0; e < evals.size(); ++e) {
      EXPECT_EQ(hosts_[0].evals.at(e).outcome.tokens, evals[e].outcome.tokens);
      EXPECT_NEAR(hosts_[0].evals[e].outcome.loss, evals[e].outcome.loss,
                  1e-5 * evals[e].outcome.loss);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Patterns, DealingOfPatternTest,
    ::testing::Values(patterns::Pattern::kDense, patterns::Pattern::kSlidingWindow,
                      patterns::Pattern::kVerticalSlash, patterns::Pattern::kBlockTopK,
                      patterns::Pattern::kXAttention, patterns::Pattern::kKeyGroups,
                      patterns::Pattern::kAdaSpa));

// Of how much padding follows is decided by the ranks. Blocks of several tiles may hold some beside
// what is seen whole.
TEST_F(SamplesJobTest, PaddingHasNoSayInWhatBlocksOfTilesAreChosen) {
  const auto job_of = [&](int context, int data, patterns::Mask mask) {
    TrainingJob job = Job(context, data, patterns::Pattern::kBlockTopK);
    job.attention.block_size = 128;
    job.attention.mask = mask;
    if (mask == patterns::Mask::kBlockCausal) job.attention.mask_block = 96;
    job.batching.hidden_share = 0.3;
    return job;
  };
  for (const patterns::Mask mask : {patterns::Mask::kFull, patterns::Mask::kBlockCausal}) {
    ASSERT_EQ(Run(job_of(1, 1, mask)), absl::OkStatus());
    const std::vector<StepRecord> alone = hosts_[0].steps;
    for (const auto& [context, data] : {std::pair{2, 1}, {4, 1}, {1, 2}}) {
      ASSERT_EQ(Run(job_of(context, data, mask)), absl::OkStatus());
      for (size_t step = 0; step < alone.size(); ++step) {
        const StepRecord& record = hosts_[0].steps.at(step);
        EXPECT_NEAR(record.loss, alone[step].loss, 1e-5 * alone[step].loss) << context << data;
        EXPECT_NEAR(record.gradient_norm, alone[step].gradient_norm,
                    1e-5 * alone[step].gradient_norm)
            << context << data;
      }
    }
  }
}

// The same samples one after another to the groups: the same losses, further from even.
TEST_F(SamplesJobTest, SamplesMayBeDealtInOrder) {
  const auto weights = *balance::SampleWeights::Create({{64, 1}, {512, 20}});
  TrainingJob job = Job(1, 2);
  job.plan.sample_weights = weights;
  ASSERT_EQ(Run(job), absl::OkStatus());
  const std::vector<StepRecord> by_cost = hosts_[0].steps;
  job = Job(1, 2);
  job.plan.sample_weights = weights;
  job.deals_in_order = true;
  ASSERT_EQ(Run(job), absl::OkStatus());
  double more = 0;
  for (size_t i = 0; i < by_cost.size(); ++i) {
    const StepRecord& record = hosts_[0].steps.at(i);
    EXPECT_NEAR(record.loss, by_cost[i].loss, 1e-5 * by_cost[i].loss);
    EXPECT_EQ(record.micro_batches, 6u) << "one a sample";
    EXPECT_EQ(record.group_micro_batches, 3u);
    more += record.dealt_imbalance - by_cost[i].dealt_imbalance;
  }
  EXPECT_GT(more, 0);
}

// Under dense attention short samples share micro-batches; a pattern that is chosen online and
// keeps everything has one in each. What a sample sees is what it sees alone.
TEST_F(SamplesJobTest, ASampleSeesNothingOfThoseBesideIt) {
  ASSERT_EQ(Run(Job(1, 1)), absl::OkStatus());
  const std::vector<StepRecord> together = hosts_[0].steps;
  TrainingJob job = Job(1, 1, patterns::Pattern::kBlockTopK);
  job.attention.topk_blocks = 64;
  ASSERT_EQ(Run(job), absl::OkStatus());
  for (size_t step = 0; step < together.size(); ++step) {
    const StepRecord& apart = hosts_[0].steps.at(step);
    EXPECT_EQ(apart.micro_batches, 6u);
    EXPECT_LT(together[step].micro_batches, 6u);
    EXPECT_GT(together[step].padding_tokens, 0u);
    EXPECT_EQ((together[step].tokens + together[step].padding_tokens) % 64, 0u);
    EXPECT_NEAR(apart.loss, together[step].loss, 1e-5 * together[step].loss);
  }
}

TEST_F(SamplesJobTest, MicroBatchesMayBeOfDifferentLengths) {
  WriteDocuments("two", 0, {512, 128});
  TrainingJob job = Job(2, 1);
  job.train_data = directory_.File("two/train");
  job.global_batch = 2;
  job.steps = 1;
  ASSERT_EQ(Run(job), absl::OkStatus());
  EXPECT_EQ(hosts_[0].steps[0].tokens, 640u);
  EXPECT_EQ(hosts_[0].steps[0].padding_tokens, 0u);
  EXPECT_EQ(hosts_[0].steps[0].dealt_imbalance, 1.0);  // of one group
  // Dense, in tiles of 64: 8 and 2 of them a sample, 4 heads, dealt out in stripes of one tile.
  uint64_t tiles = 0;
  for (const RecordingHost& host : hosts_) {
    for (const uint64_t step : host.steps[0].layers.at(0).tiles_per_ring_step) tiles += step;
  }
  EXPECT_EQ(tiles, 4u * (8 * 9 / 2 + 2 * 3 / 2));
}

TEST_F(SamplesJobTest, AResumedJobDealsAsBefore) {
  TrainingJob job = Job(1, 2, patterns::Pattern::kVerticalSlash);
  ASSERT_EQ(Run(job), absl::OkStatus());
  const std::vector<double> undisturbed = Losses();
  job.checkpoint_directory += "-2";
  ASSERT_EQ(Run(job, 2), absl::OkStatus());
  EXPECT_EQ(Losses(), std::vector<double>(undisturbed.begin(), undisturbed.begin() + 2));
  ASSERT_EQ(Run(job), absl::OkStatus());
  EXPECT_EQ(Losses(), std::vector<double>(undisturbed.begin() + 2, undisturbed.end()));
  job.batching.overlong = data::Overlong::kDrop;  // other samples
  EXPECT_THAT(std::string(Run(job).message()), HasSubstr("is of another job"));
}

TEST_F(SamplesJobTest, ASlowGroupIsDealtLess) {
  for (const size_t slow : {0, 1}) {
    TrainingJob job = Job(1, 2);
    job.plan.sample_weights = *balance::SampleWeights::Create({{64, 1}, {512, 8}});
    job.plan.group_permille = {1000, 1000};
    job.plan.group_permille[slow] = 250;
    ASSERT_EQ(Run(job), absl::OkStatus());
    for (size_t step = 0; step < 3; ++step) {
      EXPECT_LT(hosts_[slow].steps.at(step).group_tokens,
                hosts_[1 - slow].steps.at(step).group_tokens);
    }
  }
}

// A plan that came while the job ran says what dealt each of its steps.
TEST_F(SamplesJobTest, AResumedJobDealsEachStepByTheWeightsOfItsTime) {
  TrainingJob job = Job(1, 2, patterns::Pattern::kBlockTopK);
  job.plan.sample_weights = *balance::SampleWeights::Create({{1, 5}, {512, 5}});
  ASSERT_EQ(Run(job), absl::OkStatus());
  const std::vector<StepRecord> alike = hosts_[0].steps;
  job.checkpoint_directory += "-2";
  job.plan.earlier_weights.push_back({.from_step = 0, .weights = job.plan.sample_weights});
  job.plan.sample_weights = *balance::SampleWeights::Create({{64, 0.001}, {512, 100}});
  job.plan.weights_from_step = 3;
  ASSERT_EQ(Run(job), absl::OkStatus());
  EXPECT_EQ(hosts_[0].steps.at(1).dealt_imbalance, alike[1].dealt_imbalance);
  EXPECT_EQ(hosts_[0].steps.at(1).group_tokens, alike[1].group_tokens);
  EXPECT_NE(hosts_[0].steps.at(2).dealt_imbalance, alike[2].dealt_imbalance);
}

// What micro-batches of each length visited, of all ranks together, is what the layers visited.
TEST_F(SamplesJobTest, ReportsSayWhatEachLengthVisited) {
  TrainingJob job = Job(2, 2, patterns::Pattern::kBlockTopK);
  job.plan.sample_weights = *balance::SampleWeights::Create({{128, 1}, {256, 2}, {512, 6}});
  ASSERT_EQ(Run(job), absl::OkStatus());
  for (size_t step = 0; step < 3; ++step) {
    uint64_t visited = 0, of_layers = 0, micro_batches = 0;
    for (const RecordingHost& host : hosts_) {
      const StepRecord& record = host.steps.at(step);
      uint64_t mine = 0;
      for (const auto& [tokens, of_length] : record.lengths) {
        EXPECT_TRUE(tokens == 128 || tokens == 256 || tokens == 512) << tokens;
        EXPECT_LE(of_length.tiles.visited, of_length.tiles.causal);
        // One sample's own block of 64 and one more are everything up to 128 tokens.
        if (tokens == 128) {
          EXPECT_EQ(of_length.tiles.visited, of_length.tiles.causal);
        } else if (tokens == 512) {
          EXPECT_LT(of_length.tiles.visited, of_length.tiles.causal);
        }
        visited += of_length.tiles.visited;
        mine += of_length.micro_batches;
      }
      EXPECT_EQ(mine, record.group_micro_batches);
      micro_batches += mine;
      for (const attention::LayerStats& layer : record.layers) of_layers += layer.TotalTiles();
    }
    EXPECT_EQ(visited, of_layers);
    EXPECT_EQ(micro_batches, 2 * hosts_[0].steps[step].micro_batches);
  }
}

// Groups of unequal micro-batches wait for each other less, where nothing else has them meet.
TEST_F(SamplesJobTest, GroupsSumTheirGradientsOnceAStepWhereTheyMay) {
  const auto settings_of = [this](TrainingJob job) {
    job.steps = 1;
    job.eval_sequences = 0;
    ::testing::internal::CaptureStdout();
    EXPECT_EQ(Run(job), absl::OkStatus());
    return ::testing::internal::GetCapturedStdout();
  };
  const std::string once = "| summed over ranks once a step ";
  const std::string each = "| summed over ranks in every micro-batch ";
  EXPECT_THAT(settings_of(Job(1, 2)), HasSubstr(once));
  EXPECT_THAT(settings_of(Job(2, 1)), HasSubstr(each)) << "one group";
  TrainingJob in_order = Job(1, 2);
  in_order.deals_in_order = true;
  EXPECT_THAT(settings_of(in_order), HasSubstr(each)) << "for comparison";
  TrainingJob packed = Job(1, 2);
  packed.batching = {};
  EXPECT_THAT(settings_of(packed), HasSubstr(each)) << "as many micro-batches in each";
  TrainingJob deterministic = Job(1, 2);
  deterministic.deterministic = true;
  EXPECT_THAT(settings_of(deterministic), HasSubstr(each)) << "whatever memory is free";
}

// By the power of two that a document fits; what fills a micro-batch up is none.
TEST_F(SamplesJobTest, ReportsCountTheDocumentsOfEachLength) {
  TrainingJob job = Job(2, 2);
  job.global_batch = 12;
  job.steps = 2;
  ASSERT_EQ(Run(job), absl::OkStatus());
  for (size_t step = 0; step < 2; ++step) {
    const StepRecord& first = hosts_[0].steps.at(step);
    uint64_t documents = 0, most_tokens = 0;
    for (const size_t group : {0, 1}) {
      EXPECT_EQ(hosts_[2 * group].steps.at(step).group, group);
      const auto& lengths = hosts_[2 * group].steps.at(step).documents;
      EXPECT_EQ(hosts_[2 * group + 1].steps.at(step).documents, lengths);
      for (const auto& [tokens, count] : lengths) {
        documents += count;
        most_tokens += tokens * count;
      }
    }
    EXPECT_EQ(documents, first.samples);
    EXPECT_GE(most_tokens, first.tokens);
    EXPECT_LT(most_tokens, 2 * first.tokens);
    EXPECT_GT(first.padding_tokens, 0u);
    // A group's tokens are those of all its micro-batches.
    EXPECT_GT(first.micro_batches, 2u);
    EXPECT_EQ(first.group_tokens + hosts_[2].steps.at(step).group_tokens,
              first.tokens + first.padding_tokens);
  }
}

// Two groups of two ranks: the one that was dealt more keeps less, the other more, and both see the
// same whether backward recomputes or not.
TEST_F(SamplesJobTest, GroupsComeToTheirAnchor) {
  WriteDocuments("uneven", 0, {512, 256, 256});
  for (const auto pattern : {patterns::Pattern::kBlockTopK, patterns::Pattern::kVerticalSlash}) {
    TrainingJob job = Job(2, 2, pattern);
    job.train_data = directory_.File("uneven/train");
    job.global_batch = 3;
    job.steps = 2;
    job.attention.topk_blocks = 3;
    // The long one in one group, three times the work of the two in the other.
    job.plan.sample_weights = *balance::SampleWeights::Create({{256, 1, 0.9}, {512, 6, 5.4}});
    const auto tiles_of = [&](int group) {
      uint64_t tiles = 0;
      for (const int rank : {2 * group, 2 * group + 1}) {
        for (const attention::LayerStats& layer : hosts_[rank].steps[0].layers) {
          tiles += layer.TotalTiles();
        }
      }
      return static_cast<double>(tiles);
    };
    ASSERT_EQ(Run(job), absl::OkStatus());
    const int heavy =
        hosts_[0].steps[0].group_tokens == 512 && hosts_[0].steps[0].group_micro_batches == 1 ? 0
                                                                                              : 1;
    const double heavy_before = tiles_of(heavy), light_before = tiles_of(1 - heavy);
    const std::vector<double> unbalanced = Losses();

    job.checkpoint_directory += "-still";
    job.attention.balance = {.anchor = kernels::Anchor::kMean, .tolerance = 0.0f};
    ASSERT_EQ(Run(job), absl::OkStatus());
    EXPECT_EQ(Losses(), unbalanced);
    EXPECT_EQ(hosts_[0].steps[0].layers[0].balanced, 0u);
    EXPECT_TRUE(hosts_[2 * heavy].steps[0].lengths.contains(512));

    job.checkpoint_directory += "-moved";
    job.attention.balance.tolerance = 0.5f;
    ASSERT_EQ(Run(job), absl::OkStatus());
    EXPECT_LT(tiles_of(heavy), heavy_before);
    EXPECT_GE(tiles_of(1 - heavy), light_before);
    EXPECT_GT(hosts_[2 * heavy].steps[0].layers[0].balanced, 0u);
    // Samples are not weighed anew by budgets that follow from their weights.
    for (const RecordingHost& host : hosts_) EXPECT_TRUE(host.steps[0].lengths.empty());
    const std::vector<double> moved = Losses();
    EXPECT_NE(moved, unbalanced);

    // Nobody waits for a group that evaluates: weights that do not change score as before the step.
    TrainingJob unlearning = job;
    unlearning.checkpoint_directory += "-evaluated";
    unlearning.schedule.peak = 0;
    ASSERT_EQ(Run(unlearning), absl::OkStatus());
    EXPECT_GT(hosts_[2 * heavy].steps[0].layers[0].balanced, 0u);
    ASSERT_EQ(hosts_[0].evals.size(), 2u);
    EXPECT_EQ(hosts_[0].evals[1].outcome.loss, hosts_[0].evals[0].outcome.loss);

    job.checkpoint_directory += "-recomputed";
    job.memory.recompute = model::Recompute::kFull;
    ASSERT_EQ(Run(job), absl::OkStatus());
    EXPECT_EQ(Losses(), moved);
  }
}

// A loss over none would be no number, and every weight after it.
TEST_F(SamplesJobTest, StepsWithoutATokenToPredictEndTheJobByName) {
  TrainingJob job = Job(2, 1);
  job.attention.mask = patterns::Mask::kFull;
  job.batching.hidden_share = 1e-9;
  job.max_skipped_steps = 1;
  EXPECT_EQ(Run(job),
            absl::FailedPreconditionError("step 2 has no token to predict, and the 1 steps "
                                          "before it were skipped, too; look at " +
                                          job.train_data));
}

// One prompt that fills a step is no reason to end.
TEST_F(SamplesJobTest, AStepWithoutATokenToPredictIsSkipped) {
  TrainingJob job = Job(1, 1);
  job.attention.mask = patterns::Mask::kFull;
  job.global_batch = 1;
  job.steps = 40;
  job.batching.hidden_share = 0.01;  // of 13 tokens most often none is hidden
  job.max_skipped_steps = 40;
  ASSERT_EQ(Run(job), absl::OkStatus());
  double last_loss = 0;
  size_t skipped = 0;
  for (const StepRecord& step : hosts_[0].steps) {
    EXPECT_EQ(step.skipped, !step.has_labels);
    EXPECT_TRUE(std::isfinite(step.loss) && std::isfinite(step.gradient_norm)) << step.step;
    if (step.skipped) {
      ++skipped;
      EXPECT_EQ(step.loss, last_loss);
      EXPECT_EQ(step.gradient_norm, 0);
    }
    last_loss = step.loss;
  }
  EXPECT_GT(skipped, 0u);
  EXPECT_LT(skipped, 40u);
}

TEST_F(SamplesJobTest, DocumentsThatAreTooLongAreCountedOrRefused) {
  TrainingJob job = Job(1, 1);
  ::testing::internal::CaptureStdout();
  ASSERT_EQ(Run(job), absl::OkStatus());
  const std::string said = ::testing::internal::GetCapturedStdout();
  for (const std::string& line :
       {job.train_data + ": 27 samples of 25 documents; 1 documents (1300 tokens) of more than 512",
        job.eval_data + ": 7 samples of 7 documents; 0 documents (0 tokens) of more than 512"}) {
    EXPECT_THAT(said, HasSubstr(line + " tokens split\n"));
  }
  for (const StepRecord& step : hosts_[0].steps) {
    EXPECT_EQ(step.overlong.overlong, 1u);
    EXPECT_EQ(step.overlong.overlong_tokens, 1300u);
  }
  job = Job(1, 1);
  job.batching.overlong = data::Overlong::kDrop;
  ASSERT_EQ(Run(job), absl::OkStatus());
  job = Job(1, 1);
  job.batching.overlong = data::Overlong::kRefuse;
  const std::string refused(Run(job).message());
  EXPECT_THAT(refused, HasSubstr("1 of "));
  EXPECT_THAT(refused, HasSubstr("set data.overlong: split or drop"));
}

}  // namespace
}  // namespace ringleader::trainer
