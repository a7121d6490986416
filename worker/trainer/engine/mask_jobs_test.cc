// Jobs under attention.mask, with every pattern that goes with one: on any number of ranks they
// train what one rank trains, and go on where they stopped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/testing/temp_dir.h"
#include "patterns/pattern.h"
#include "worker/data/pack/pack_folder.h"
#include "worker/trainer/testing/attempt_in_process.h"

namespace ringleader::trainer {
namespace {

using patterns::Mask;
using patterns::Pattern;
using ::testing::HasSubstr;
using testing::RecordingHost;

struct MaskedJob {
  Mask mask;
  Pattern pattern = Pattern::kDense;
};

class MaskJobsTest : public ::testing::TestWithParam<MaskedJob> {
 protected:
  // Documents of 30 to 300 bytes, whose first line is their prefix.
  MaskJobsTest() {
    const std::string text = directory_.File("documents");
    std::filesystem::create_directories(text);
    for (int i = 0; i < 40; ++i) {
      std::ofstream out(text + "/" + std::to_string(100 + i));
      const int bytes = 30 + i * i * 270 / 1600;
      for (int b = 0; b < bytes; ++b) {
        out << (b == bytes / 3 ? '\n' : static_cast<char>('a' + (b * (i + 3) + b / 7) % 26));
      }
    }
    Pack("packed", '\n');
    Pack("plain", std::nullopt);
  }
  void Pack(const std::string& name, std::optional<uint32_t> prefix_end) {
    data::PackOptions pack;
    pack.paths = {directory_.File("documents")};
    pack.output = directory_.File(name);
    pack.eval_share = 0;
    pack.prefix_end = prefix_end;
    ASSERT_TRUE(data::Pack(pack).ok());
  }

  TrainingJob Job(int context, const MaskedJob& masked) {
    const Mask mask = masked.mask;
    TrainingJob job = testing::TinyTrainingJob(directory_.path().string(), context, /*data=*/1);
    job.train_data = job.eval_data = directory_.File("packed/train");
    job.document_mask = true;
    job.steps = job.schedule.total_steps = 4;
    job.attention.mask = mask;
    job.attention.mask_block = 24;
    job.attention.pattern = masked.pattern;
    if (masked.pattern != Pattern::kDense) {
      // Of the blocks that most queries see, about a half.
      job.attention.block_size = 64;
      job.attention.topk_blocks = 1;
      job.attention.stride = 16;
      job.attention.threshold = 0.5;
      job.attention.density = masked.pattern == Pattern::kAdaSpa ? 0.4 : 0;
    }
    job.batching.prefixes = mask == Mask::kPrefixLm;
    if (mask == Mask::kFull || mask == Mask::kBlockCausal) {
      job.batching.hidden_share = 0.2;
      job.batching.hidden_token = 0;
    }
    job.checkpoint_directory = directory_.File("checkpoints-" + std::to_string(++jobs_));
    return job;
  }
  std::vector<RecordingHost> Run(const TrainingJob& job, uint64_t stop_after = 0) {
    std::vector<RecordingHost> hosts(job.world_size);
    for (RecordingHost& host : hosts) {
      host.on_step = [stop_after](RecordingHost& self, const StepRecord& record) {
        self.stop = record.step == stop_after;
      };
    }
    for (const auto& outcome : testing::RunRanks(job, hosts)) {
      EXPECT_TRUE(outcome.ok()) << outcome.status();
    }
    return hosts;
  }
  static std::vector<double> LossesOf(const RecordingHost& host) {
    std::vector<double> losses;
    for (const StepRecord& step : host.steps) losses.push_back(step.loss);
    return losses;
  }

  TempDir directory_;
  int jobs_ = 0;
};

TEST_P(MaskJobsTest, AnyNumberOfRanksTrainsWhatOneRankTrains) {
  for (const bool samples : {false, true}) {
    const auto job_of = [&](int context) {
      TrainingJob job = Job(context, GetParam());
      job.batching.samples = samples;
      if (samples) job.global_batch = 6;
      return job;
    };
    const std::vector<RecordingHost> alone = Run(job_of(1));
    for (const int context : {2, 4}) {
      const std::vector<RecordingHost> hosts = Run(job_of(context));
      ASSERT_EQ(hosts[0].steps.size(), 4u);
      for (size_t step = 0; step < 4; ++step) {
        const StepRecord &record = hosts[0].steps[step], &expected = alone[0].steps.at(step);
        EXPECT_EQ(record.tokens, expected.tokens);
        EXPECT_NEAR(record.loss, expected.loss, 1e-5 * expected.loss) << context << " " << step;
        EXPECT_NEAR(record.gradient_norm, expected.gradient_norm, 1e-5 * expected.gradient_norm);
      }
      ASSERT_EQ(hosts[0].evals.size(), alone[0].evals.size());
      for (size_t e = 0; e < alone[0].evals.size(); ++e) {
        const EvalOutcome& expected = alone[0].evals[e].outcome;
        EXPECT_NEAR(hosts[0].evals[e].outcome.loss, expected.loss, 1e-5 * expected.loss);
      }
    }
  }
}

// Over an epoch's end, after which other tokens are hidden.
TEST_P(MaskJobsTest, ResumesBitForBit) {
  TrainingJob job = Job(2, GetParam());
  job.steps = job.schedule.total_steps = 20;
  job.checkpoint_every_steps = 1;
  const std::vector<double> undisturbed = LossesOf(Run(job)[0]);
  ASSERT_EQ(undisturbed.size(), 20u);
  job.checkpoint_directory += "-2";
  EXPECT_EQ(LossesOf(Run(job, 3)[0]).size(), 3u);
  EXPECT_EQ(LossesOf(Run(job)[0]), std::vector<double>(undisturbed.begin() + 3, undisturbed.end()));
}

// What the mask shows decides about losses, and the model says under which it was trained.
TEST_P(MaskJobsTest, TrainsSomethingElseThanACausalJob) {
  const TrainingJob causal = Job(1, {.mask = Mask::kCausal, .pattern = GetParam().pattern});
  const TrainingJob job = Job(1, GetParam());
  const std::vector<RecordingHost> masked = Run(job), plain = Run(causal);
  EXPECT_NE(LossesOf(masked[0]), LossesOf(plain[0]));
  EXPECT_EQ(masked[0].steps[0].tokens, plain[0].steps[0].tokens);
  const auto config = nlohmann::json::parse(ReadFile(masked[0].model + "/config.json").value());
  EXPECT_EQ(config.contains("is_causal"), GetParam().mask == Mask::kFull);
  EXPECT_EQ(config.contains("ringleader_attention_mask"), GetParam().mask != Mask::kFull);
}

std::vector<MaskedJob> MaskedJobs(const std::vector<Pattern>& patterns) {
  std::vector<MaskedJob> jobs;
  for (const Mask mask : {Mask::kFull, Mask::kPrefixLm, Mask::kBlockCausal}) {
    for (const Pattern pattern : patterns) jobs.push_back({.mask = mask, .pattern = pattern});
  }
  return jobs;
}
std::string NameOf(const ::testing::TestParamInfo<MaskedJob>& info) {
  return std::string(MaskName(info.param.mask)) + "_" +
         std::string(patterns::DefinitionOf(info.param.pattern).name);
}

INSTANTIATE_TEST_SUITE_P(Masks, MaskJobsTest,
                         ::testing::ValuesIn(MaskedJobs({Pattern::kDense, Pattern::kBlockTopK,
                                                         Pattern::kXAttention, Pattern::kAdaSpa})),
                         NameOf);

class ChosenMaskJobsTest : public MaskJobsTest {};

// What was chosen decides about losses.
TEST_P(ChosenMaskJobsTest, TrainsSomethingElseThanADenseJob) {
  EXPECT_NE(LossesOf(Run(Job(1, GetParam()))[0]),
            LossesOf(Run(Job(1, {.mask = GetParam().mask}))[0]));
}

INSTANTIATE_TEST_SUITE_P(Masks, ChosenMaskJobsTest,
                         ::testing::ValuesIn(MaskedJobs({Pattern::kBlockTopK, Pattern::kXAttention,
                                                         Pattern::kAdaSpa})),
                         NameOf);

class MaskedDataTest : public MaskJobsTest {};

TEST_P(MaskedDataTest, WithoutPrefixesIsRefused) {
  TrainingJob job = Job(1, GetParam());
  job.train_data = directory_.File("plain/train");
  std::vector<RecordingHost> hosts(1);
  const absl::Status refused = testing::RunRanks(job, hosts)[0].status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("pack it with `ringctl data pack --prefix-end`"));
}

INSTANTIATE_TEST_SUITE_P(PrefixLm, MaskedDataTest,
                         ::testing::Values(MaskedJob{.mask = Mask::kPrefixLm}));

}  // namespace
}  // namespace ringleader::trainer
