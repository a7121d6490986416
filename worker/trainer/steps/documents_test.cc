// Jobs whose sequences lie by documents: on any number of ranks they train what one rank trains.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/testing/temp_dir.h"
#include "gtest/gtest.h"
#include "worker/data/pack/pack_folder.h"
#include "worker/trainer/testing/attempt_in_process.h"

namespace ringleader::trainer {
namespace {

using testing::RecordingHost;

class DocumentsJobTest : public ::testing::TestWithParam<bool> {
 protected:
  // Documents of 12 to 300 bytes, and some of 700.
  DocumentsJobTest() {
    const std::string text = directory_.File("documents");
    std::filesystem::create_directories(text);
    for (int i = 0; i < 40; ++i) {
      std::ofstream out(text + "/" + std::to_string(100 + i));
      const int bytes = i % 9 == 4 ? 700 : 12 + i * i * 288 / 1600;
      for (int b = 0; b < bytes; ++b) out << static_cast<char>('a' + (b * (i + 3) + b / 7) % 26);
    }
    data::PackOptions pack;
    pack.paths = {text};
    pack.output = directory_.File("packed");
    pack.eval_share = 0;
    EXPECT_TRUE(data::Pack(pack).ok());
  }

  TrainingJob Job(int context, bool samples, int data = 1) {
    TrainingJob job = testing::TinyTrainingJob(directory_.path().string(), context, data);
    job.train_data = job.eval_data = directory_.File("packed/train");
    job.document_mask = true;
    job.batching = {.samples = samples, .overlong = data::Overlong::kSplit};
    job.global_batch = samples ? 8 : 2;
    job.steps = 3;
    job.eval_sequences = 2;
    job.attention.pattern = patterns::Pattern::kDense;
    job.checkpoint_directory = directory_.File("checkpoints-" + std::to_string(++jobs_));
    // Long ones weigh more than their tokens do.
    job.plan.sample_weights =
        *balance::SampleWeights::Create({{16, 1}, {64, 5}, {256, 30}, {512, 100}});
    return job;
  }
  static void LieByDocuments(TrainingJob* job) {
    job->plan.by_documents = job->attention.by_documents = true;
  }
  std::vector<RecordingHost> Run(const TrainingJob& job) {
    std::vector<RecordingHost> hosts(job.world_size);
    for (const auto& outcome : testing::RunRanks(job, hosts)) {
      EXPECT_TRUE(outcome.ok()) << outcome.status();
    }
    return hosts;
  }
  TempDir directory_;
  int jobs_ = 0;
};

TEST_P(DocumentsJobTest, AnyNumberOfRanksTrainsWhatOneRankTrains) {
  const std::vector<RecordingHost> alone = Run(Job(1, GetParam()));
  for (const int context : {1, 2, 4}) {
    TrainingJob job = Job(context, GetParam());
    LieByDocuments(&job);
    const std::vector<RecordingHost> hosts = Run(job);
    ASSERT_EQ(hosts[0].steps.size(), 3u);
    for (size_t step = 0; step < 3; ++step) {
      const StepRecord &record = hosts[0].steps[step], &expected = alone[0].steps.at(step);
      EXPECT_EQ(record.tokens, expected.tokens);
      EXPECT_NEAR(record.loss, expected.loss, 1e-5 * expected.loss) << context << " " << step;
      EXPECT_NEAR(record.gradient_norm, expected.gradient_norm, 1e-5 * expected.gradient_norm)
          << context << " " << step;
    }
    ASSERT_EQ(hosts[0].evals.size(), alone[0].evals.size());
    for (size_t e = 0; e < alone[0].evals.size(); ++e) {
      const EvalOutcome& expected = alone[0].evals[e].outcome;
      EXPECT_EQ(hosts[0].evals[e].outcome.tokens, expected.tokens);
      EXPECT_NEAR(hosts[0].evals[e].outcome.loss, expected.loss, 1e-5 * expected.loss);
    }
  }
}

// Under a pattern that chooses, whatever the ranks, the dealing and the samples that share a
// micro-batch: a document sees what it sees alone.
TEST_P(DocumentsJobTest, AnyNumberOfRanksChoosesWhatOneRankChooses) {
  for (const auto pattern : {patterns::Pattern::kVerticalSlash, patterns::Pattern::kKeyGroups}) {
    const auto run = [&](int context, int data, bool by_documents) {
      TrainingJob job = Job(context, GetParam(), data);
      job.attention.pattern = pattern;
      job.attention.estimate_queries = 16;
      job.attention.density = 0.3;
      job.attention.sequence_length = 512;
      job.attention.budget = {.max_verticals = 16, .max_slashes = 2};
      if (by_documents) LieByDocuments(&job);
      return Run(job);
    };
    const std::vector<RecordingHost> one = run(1, 1, true);
    ASSERT_EQ(one[0].steps.size(), 3u);
    std::vector<std::vector<RecordingHost>> others;
    others.push_back(run(2, 1, true));
    others.push_back(run(4, 1, true));
    others.push_back(run(2, 2, true));
    // Samples that have a micro-batch each see what they see alone in stripes, too.
    if (GetParam()) others.push_back(run(1, 1, false));
    for (size_t i = 0; i < others.size(); ++i) {
      for (size_t step = 0; step < 3; ++step) {
        SCOPED_TRACE(::testing::Message() << "run " << i << ", step " << step);
        const StepRecord &record = others[i][0].steps.at(step), &expected = one[0].steps[step];
        EXPECT_EQ(record.tokens, expected.tokens);
        EXPECT_NEAR(record.loss, expected.loss, 1e-5 * expected.loss);
        EXPECT_NEAR(record.gradient_norm, expected.gradient_norm, 1e-5 * expected.gradient_norm);
      }
      for (size_t e = 0; e < one[0].evals.size(); ++e) {
        EXPECT_NEAR(others[i][0].evals.at(e).outcome.loss, one[0].evals[e].outcome.loss,
                    1e-5 * one[0].evals[e].outcome.loss);
      }
    }
    // All ranks say what filled micro-batches up, and it is what they hold too much.
    for (const RecordingHost& host : others[1]) {
      const StepRecord& record = host.steps[0];
      EXPECT_EQ(record.rank_tokens * 4, record.tokens + record.padding_tokens);
      EXPECT_LT(record.padding_tokens, record.tokens);
      EXPECT_TRUE(record.lengths.empty());
    }
    if (GetParam()) {
      EXPECT_LT(others[1][0].steps[0].micro_batches, 8u);
      EXPECT_EQ(others.back()[0].steps[0].micro_batches, others.back()[0].steps[0].samples);
    }
  }
}

// Where all documents are short a sparse job is a dense one; where some are, it is neither.
TEST_P(DocumentsJobTest, ShortDocumentsTrainDensely) {
  const auto losses = [&](int context, patterns::Pattern pattern, int64_t dense_below) {
    TrainingJob job = Job(context, GetParam());
    job.attention.pattern = pattern;
    job.attention.window = 16;
    job.attention.dense_below = dense_below;
    std::vector<double> all;
    const std::vector<RecordingHost> hosts = Run(job);
    for (const StepRecord& step : hosts[0].steps) all.push_back(step.loss);
    for (const EvalRecord& eval : hosts[0].evals) all.push_back(eval.outcome.loss);
    return all;
  };
  const std::vector<double> dense = losses(1, patterns::Pattern::kDense, 0);
  const std::vector<double> sparse = losses(1, patterns::Pattern::kSlidingWindow, 0);
  EXPECT_GT(std::abs(sparse.back() - dense.back()), 1e-4);
  for (const int context : {1, 2}) {
    const std::vector<double> all = losses(context, patterns::Pattern::kSlidingWindow, 1000);
    const std::vector<double> some = losses(context, patterns::Pattern::kSlidingWindow, 400);
    ASSERT_EQ(all.size(), dense.size());
    for (size_t i = 0; i < all.size(); ++i) EXPECT_NEAR(all[i], dense[i], 1e-5 * dense[i]) << i;
    EXPECT_GT(std::abs(some.back() - dense.back()), 1e-5);
    EXPECT_GT(std::abs(some.back() - sparse.back()), 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(Batching, DocumentsJobTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Samples" : "Packed"; });

}  // namespace
}  // namespace ringleader::trainer
