// Whole attempts on GPUs under each way to attend: masks, short documents, heads that ranks share
// out, groups of heads and patterns that choose train what the CPU trains, and on several ranks
// what one rank trains.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/pack/pack_folder.h"
#include "worker/trainer/testing/cuda_attempt_test.h"

namespace ringleader::trainer {
namespace {

using testing::Gpus;
using testing::Losses;
using testing::RankLog;
using testing::RanksPerGpu;
using testing::TinyPlan;

class CudaAttentionProcessTest : public testing::CudaAttemptTest {
 protected:
  // The job with attention of this pattern alone.
  v1::JobSpec PatternJob(int context, v1::AttentionSpec::Pattern pattern) {
    v1::JobSpec spec = GpuJob(context);
    spec.mutable_attention()->Clear();
    spec.mutable_attention()->set_pattern(pattern);
    spec.mutable_attention()->set_tile(pattern == v1::AttentionSpec::KEY_GROUPS ? 64 : 128);
    return spec;
  }

  // The job on documents of 200 to 1,600 tokens, which are kept apart. Each begins with a prefix of
  // a third of it.
  v1::JobSpec DocumentsJob(int context, v1::AttentionSpec::Pattern pattern) {
    v1::JobSpec spec = PatternJob(context, pattern);
    const std::string documents = Path("documents");
    if (!std::filesystem::exists(documents)) {
      std::filesystem::create_directories(documents);
      for (int i = 0; i < 40; ++i) {
        std::ofstream out(documents + "/" + std::to_string(100 + i));
        const int bytes = 200 + i * 17 % 40 * 35;
        for (int b = 0; b < bytes; ++b) {
          out << (b == bytes / 3 ? '\n' : static_cast<char>('a' + (b * (i % 5 + 3) + b / 7) % 26));
        }
      }
      data::PackOptions pack;
      pack.paths = {documents};
      pack.output = Path("packed");
      pack.eval_share = 0.2;
      pack.prefix_end = '\n';
      EXPECT_TRUE(data::Pack(pack).ok());
    }
    spec.mutable_data()->set_train(Path("packed/train"));
    spec.mutable_data()->set_eval(Path("packed/eval"));
    spec.mutable_data()->set_document_mask(true);
    return spec;
  }

  // Whether there are GPUs for so many ranks; says so where there are not.
  static bool Fits(int ranks) {
    const int most = Gpus() * RanksPerGpu();
    if (ranks > most) std::printf("LEFT OUT: %d ranks, for there is room for %d\n", ranks, most);
    return ranks <= most;
  }

  static v1::JobSpec OnCpu(v1::JobSpec spec) {
    spec.mutable_resources()->set_engine(v1::ResourcesSpec::CPU);
    return spec;
  }
  // The logs of a job that resumes no other, by rank.
  std::vector<RankLog> Run(v1::JobSpec spec, const v1::StepPlan& plan) {
    UseCheckpoints(&spec, Path("checkpoints-" + std::to_string(++runs_)));
    std::vector<RankLog> logs = Start(spec, plan)->Finish();
    for (const RankLog& log : logs) {
      EXPECT_EQ(log.steps.size(), spec.training().steps()) << Output();
    }
    return logs;
  }
  std::vector<RankLog> Run(const v1::JobSpec& spec) { return Run(spec, TinyPlan(spec)); }

  // Tiles that all ranks visited in a step.
  static double TilesOf(const std::vector<RankLog>& logs, size_t step) {
    uint64_t tiles = 0;
    for (const RankLog& log : logs) {
      for (const v1::LayerReport& layer : log.steps.at(step).layers()) {
        for (const uint64_t of_step : layer.tiles_per_ring_step()) tiles += of_step;
        tiles += layer.column_tiles();
      }
    }
    return static_cast<double>(tiles);
  }

  // Both learn the same from the same tokens, and visit as much.
  void ExpectAlike(const std::vector<RankLog>& actual, const std::vector<RankLog>& expected) {
    ExpectNear(Losses(actual[0]), Losses(expected[0]), kLossNoise);
    ASSERT_EQ(actual[0].steps.size(), expected[0].steps.size());
    double largest = 0, most = 0;
    for (size_t i = 0; i < actual[0].steps.size(); ++i) {
      SCOPED_TRACE("step " + std::to_string(i + 1));
      const v1::StepReport &step = actual[0].steps[i], &other = expected[0].steps[i];
      EXPECT_EQ(step.tokens(), other.tokens());
      const double norm = other.gradient_norm(), tiles = TilesOf(expected, i);
      EXPECT_NEAR(step.gradient_norm(), norm, kGradientNoise * norm);
      EXPECT_NEAR(TilesOf(actual, i), tiles, kChoiceNoise * tiles);
      largest = std::max(largest, std::abs(step.gradient_norm() / norm - 1));
      most = std::max(most, std::abs(TilesOf(actual, i) / tiles - 1));
    }
    std::printf("largest difference of gradient norms: %.2e, of tiles: %.2e of %.0f\n", largest,
                most, TilesOf(expected, 0));
    ASSERT_EQ(actual[0].evals.size(), expected[0].evals.size());
    const double loss = expected[0].evals.back().loss();
    EXPECT_NEAR(actual[0].evals.back().loss(), loss, kLossNoise * loss);
  }

  // One GPU trains what the CPU trains, and rings of two and four what the one trains.
  void ExpectAlikeOnAnyRanks(const std::function<v1::JobSpec(int context)>& job_of) {
    const std::vector<RankLog> one = Run(job_of(1));
    ExpectAlike(one, Run(OnCpu(job_of(1))));
    for (const int context : {2, 4}) {
      if (!Fits(context)) continue;
      SCOPED_TRACE(std::to_string(context) + " ranks");
      ExpectAlike(Run(job_of(context)), one);
    }
  }

  // Relative: of bfloat16, and of choices that rounding decides. Another mask makes 0.003 of a loss
  // and 0.015 of a gradient.
  static constexpr double kLossNoise = 0.001, kGradientNoise = 0.005, kChoiceNoise = 0.02;
  int runs_ = 0;
};

class CudaMaskProcessTest : public CudaAttentionProcessTest,
                            public ::testing::WithParamInterface<v1::AttentionSpec::Mask> {
 protected:
  v1::JobSpec MaskJob(int context, v1::AttentionSpec::Mask mask,
                      v1::AttentionSpec::Pattern pattern = v1::AttentionSpec::DENSE) {
    v1::JobSpec spec = DocumentsJob(context, pattern);
    spec.mutable_attention()->set_mask(mask);
    if (mask == v1::AttentionSpec::MASK_BLOCK_CAUSAL) spec.mutable_attention()->set_mask_block(96);
    if (mask != v1::AttentionSpec::MASK_PREFIX_LM) {
      spec.mutable_data()->set_hidden_share(0.2);
      spec.mutable_data()->set_hidden_token(260);
    }
    return spec;
  }
};

TEST_P(CudaMaskProcessTest, TrainsWhatTheCpuTrainsOnAnyNumberOfRanks) {
  NEED_GPUS(1);
  ExpectAlikeOnAnyRanks([&](int context) { return MaskJob(context, GetParam()); });
}

TEST_P(CudaMaskProcessTest, ChosenTilesAreThoseOfTheCpuAndOfAnyNumberOfRanks) {
  NEED_GPUS(1);
  for (const auto pattern :
       {v1::AttentionSpec::BLOCK_TOPK, v1::AttentionSpec::XATTENTION, v1::AttentionSpec::ADASPA}) {
    SCOPED_TRACE(v1::AttentionSpec::Pattern_Name(pattern));
    ExpectAlikeOnAnyRanks([&](int context) {
      v1::JobSpec spec = MaskJob(context, GetParam(), pattern);
      spec.mutable_attention()->set_tile(64);
      spec.mutable_attention()->set_density(0.3);
      return spec;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, CudaMaskProcessTest,
                         ::testing::Values(v1::AttentionSpec::MASK_FULL,
                                           v1::AttentionSpec::MASK_PREFIX_LM,
                                           v1::AttentionSpec::MASK_BLOCK_CAUSAL),
                         [](const auto& info) { return v1::AttentionSpec::Mask_Name(info.param); });

// Long documents see their diagonals and columns, short ones all of their tokens.
TEST_F(CudaAttentionProcessTest, ShortDocumentsAreDenseBesideSparseOnes) {
  NEED_GPUS(1);
  const auto job_of = [&](int context, int dense_below) {
    v1::JobSpec spec = DocumentsJob(context, v1::AttentionSpec::VERTICAL_SLASH);
    v1::AttentionSpec* attention = spec.mutable_attention();
    attention->set_tile(64);
    attention->set_density(0.15);
    attention->set_sink_tokens(8);
    attention->set_dense_below(dense_below);
    return spec;
  };
  ExpectAlikeOnAnyRanks([&](int context) { return job_of(context, 900); });
  // Their tiles are more than those that are chosen.
  EXPECT_GT(TilesOf(Run(job_of(1, 900)), 0), 1.2 * TilesOf(Run(job_of(1, 0)), 0));
}

TEST_F(CudaAttentionProcessTest, ChosenTilesAreThoseOfAnyNumberOfRanks) {
  NEED_GPUS(1);
  for (const auto pattern : {v1::AttentionSpec::ADASPA, v1::AttentionSpec::KEY_GROUPS}) {
    SCOPED_TRACE(v1::AttentionSpec::Pattern_Name(pattern));
    ExpectAlikeOnAnyRanks([&](int context) {
      v1::JobSpec spec = DocumentsJob(context, pattern);
      spec.mutable_attention()->set_tile(64);
      spec.mutable_attention()->set_density(0.3);
      return spec;
    });
  }
}

// Heads alone (Ulysses), KV heads that two ranks hold, and a ring around ranks that share (USP).
TEST_F(CudaAttentionProcessTest, RanksThatShareHeadsTrainWhatOneTrains) {
  NEED_GPUS(2);
  const auto job_of = [&](int context, int heads, v1::AttentionSpec::Pattern pattern) {
    v1::JobSpec spec = PatternJob(context, pattern);
    if (pattern == v1::AttentionSpec::VERTICAL_SLASH) spec.mutable_attention()->set_density(0.3);
    spec.mutable_parallelism()->set_heads(heads);
    return spec;
  };
  for (const auto pattern : {v1::AttentionSpec::DENSE, v1::AttentionSpec::VERTICAL_SLASH,
                             v1::AttentionSpec::KEY_GROUPS}) {
    const std::vector<RankLog> one = Run(job_of(1, 1, pattern));
    for (const auto& [context, heads] : {std::pair{2, 2}, {4, 4}, {4, 2}}) {
      // Patterns that choose want two heads on each rank, and the model has four.
      if (heads == 4 && pattern != v1::AttentionSpec::DENSE) continue;
      if (!Fits(context)) continue;
      SCOPED_TRACE(v1::AttentionSpec::Pattern_Name(pattern) + " on " + std::to_string(context) +
                   " ranks, of which " + std::to_string(heads) + " share heads");
      const std::vector<RankLog> shared = Run(job_of(context, heads, pattern));
      ExpectAlike(shared, one);
      for (const v1::StepReport& step : shared[0].steps) EXPECT_GT(step.head_bytes(), 0u);
    }
  }
}

TEST_F(CudaAttentionProcessTest, HeadsThatAreGatheredInGroupsTrainWhatOneRankTrains) {
  NEED_GPUS(2);
  for (const auto pattern : {v1::AttentionSpec::DENSE, v1::AttentionSpec::VERTICAL_SLASH}) {
    SCOPED_TRACE(v1::AttentionSpec::Pattern_Name(pattern));
    const auto job_of = [&](int context) {
      v1::JobSpec spec = PatternJob(context, pattern);
      if (pattern == v1::AttentionSpec::VERTICAL_SLASH) spec.mutable_attention()->set_density(0.3);
      return spec;
    };
    const std::vector<RankLog> one = Run(job_of(1));
    for (const int groups : {1, 2}) {
      v1::JobSpec spec = job_of(2);
      spec.mutable_parallelism()->set_ring(v1::ParallelismSpec::ALL_GATHER);
      spec.mutable_parallelism()->set_head_groups(groups);
      spec.mutable_resources()->set_recompute(v1::ResourcesSpec::FULL);  // backward starts ahead
      v1::StepPlan plan = TinyPlan(spec);
      plan.mutable_ring()->set_kind(v1::ParallelismSpec::ALL_GATHER);
      ExpectAlike(Run(spec, plan), one);
    }
  }
}

}  // namespace
}  // namespace ringleader::trainer
