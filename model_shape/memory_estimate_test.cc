#include "model_shape/memory_estimate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model_shape/parameter_layout.h"

namespace ringleader::model {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kGiB = int64_t{1} << 30;

constexpr auto kWhole = ParameterSharding::kWhole;

// Qwen2.5-3B.
ModelConfig Config() {
  ModelConfig config;
  config.vocab_size = 151936;
  config.hidden_size = 2048;
  config.intermediate_size = 11008;
  config.layers = 36;
  config.heads = 16;
  config.kv_heads = 2;
  config.head_dim = 128;
  config.tied_embeddings = true;
  config.qkv_bias = true;
  return config;
}

TrainingShape Shape(int64_t tokens) {
  return {.ranks = 4, .tokens = tokens};
}

TEST(TrainingMemoryTest, CountsWhatARankHolds) {
  const int64_t n = 131072;
  const TrainingMemory memory =
      EstimateMemory(Config(), Shape(n), {.recompute = Recompute::kFull}, kWhole);
  const ParameterLayout layout = MakeParameterLayout(Config());
  EXPECT_EQ(memory.parameters, 2 * layout.PaddedElements(4));
  EXPECT_EQ(memory.optimizer, 16 * layout.ShardElements(4));
  // Input and attention output in bf16, a log-sum-exp a head in fp32.
  EXPECT_EQ(memory.saved, 36 * n * (2 * (2048 + 2048) + 4 * 16));
  EXPECT_EQ(memory.total(),
            memory.parameters + memory.optimizer + memory.buckets + memory.saved + memory.working);

  const int64_t packed = 36 * n * 2 * (16 + 2 * 2) * 128;
  EXPECT_EQ(
      EstimateMemory(Config(), Shape(n), {.recompute = Recompute::kAttentionOnly}, kWhole).saved,
      memory.saved + packed);
  const RecomputePlan two_kept{.recompute = Recompute::kAttentionOnly, .kept_layers = 2};
  EXPECT_EQ(EstimateMemory(Config(), Shape(n), two_kept, kWhole).saved,
            memory.saved + packed + 2 * n * 2 * (2048 + 2 * 11008));
}

// FP8 takes a byte in place of a parameter, in the layers that it casts, or of those that a rank
// owns where parameters are sharded. A layer at work takes no less than one that is not cast, as
// all are in steps that read no casts; where the MLP takes most, a chunk's casts are added, and for
// the gradient of its largest weight what both operands take, turned, and their sum, where these
// are more than the values that they were cast from, or these stay.
TEST(TrainingMemoryTest, CountsCastsOfWeightsAndRows) {
  const int64_t n = 131072;
  TrainingShape shape = Shape(n);
  const TrainingMemory without = EstimateMemory(Config(), shape, {}, kWhole);
  EXPECT_EQ(without.casts, 0);
  shape.precision = Precision::kFp8;
  const TrainingMemory one = EstimateMemory(Config(), shape, {}, kWhole);
  const int64_t mlp = int64_t{3} * 2048 * 11008,
                weights = 2048 * (16 + 2 * 2) * 128 + 2048 * 2048 + mlp;
  // With the scales of 34 layers' rows, and their norms and biases.
  const ParameterLayout layout = MakeParameterLayout(Config());
  const int64_t layer = layout.blocks[1].elements;
  const int64_t rows = 20 * 128 + 2048 + 2 * 11008 + 2048;
  const int64_t beside = 4 * rows + 2 * (layer - weights);
  EXPECT_EQ(one.casts, 34 * (layer + beside));
  EXPECT_EQ(one.parameters, 2 * (layout.elements - 34 * layer));
  EXPECT_EQ(one.working, without.working) << "attention's";
  EXPECT_LT(one.total(), without.total() - 34 * layer * 9 / 10);
  const TrainingMemory shard = EstimateMemory(Config(), shape, {}, ParameterSharding::kShard);
  EXPECT_EQ(shard.casts, layout.ShardElements(4) + 34 * beside);
  EXPECT_EQ(shard.parameters,
            2 * (layout.blocks[0].elements + 2 * layer + layout.blocks.back().elements));
  shape.always_casts = false;
  EXPECT_EQ(EstimateMemory(Config(), shape, {}, kWhole).total(), without.total());
  shape.always_casts = true;
  shape.precision = Precision::kFp8AllLayers;
  const TrainingMemory all = EstimateMemory(Config(), shape, {}, kWhole);
  EXPECT_EQ(all.casts, 36 * (layer + beside));
  EXPECT_EQ(all.working, without.working);
  EXPECT_EQ(EstimateMemory(Config(), shape, {}, ParameterSharding::kShard).parameters,
            shard.parameters - 2 * layer)
      << "no layer is gathered in bf16";
  EXPECT_THAT(DescribeMemory(all), HasSubstr("weights in e4m3 2.6,"));

  const int64_t fewer = 65536, chunk = 32768;
  TrainingShape few = Shape(fewer);
  const int64_t values = EstimateMemory(Config(), few, {}, kWhole).working;
  EXPECT_EQ(values, fewer * 2 * 4 * 2048 + chunk * 2 * 3 * 11008) << "the MLP's";
  few.precision = Precision::kFp8AllLayers;
  const int64_t codes = EstimateMemory(Config(), few, {}, kWhole).working;
  EXPECT_EQ(codes, values + chunk * (int64_t{3} * 11008) + mlp);
  const int64_t turned = chunk * (2048 + int64_t{2} * 11008) + int64_t{4} * 2048 * 2 * 11008;
  ModelConfig biased = Config();
  biased.mlp_bias = true;
  EXPECT_EQ(EstimateMemory(biased, few, {}, kWhole).working, codes + turned);
  few.device_is_host = true;
  EXPECT_EQ(EstimateMemory(Config(), few, {}, kWhole).working, codes + turned);
  few = Shape(2048);
  few.precision = Precision::kFp8AllLayers;
  few.loss_chunk_tokens = 16;
  EXPECT_EQ(EstimateMemory(Config(), few, {}, kWhole).working,
            2048 * ((3 * 2 + 2) * 2048 + 3 * 11008) + 2048 * (2048 + 2 * 11008) +
                int64_t{4} * 2048 * 2 * 11008 + mlp)
      << "what is turned is more than the values of few tokens";
}

// What attention chose stays on the device, whatever is recomputed or waits on the host.
TEST(TrainingMemoryTest, CountsWhatAttentionChose) {
  TrainingShape shape = Shape(131072);
  for (const RecomputePlan& plan :
       {RecomputePlan{.recompute = Recompute::kFull},
        RecomputePlan{.recompute = Recompute::kFull, .host_layers = 35}}) {
    shape.choice_bytes = shape.choice_working_bytes = 0;
    const TrainingMemory without = EstimateMemory(Config(), shape, plan, kWhole);
    shape.choice_bytes = 5000;
    shape.choice_working_bytes = 300;
    const TrainingMemory with = EstimateMemory(Config(), shape, plan, kWhole);
    EXPECT_EQ(with.saved, without.saved + 5000);
    EXPECT_EQ(with.working, without.working + 300);
    EXPECT_EQ(with.host_total(), without.host_total());
  }
}

// Queries, the output, its gradient, keys and values, as they are sent and as they come; keys and
// values of as many heads as ranks, in place of two.
TEST(TrainingMemoryTest, CountsWhatSharingHeadsExchanges) {
  const int64_t n = 131072;
  TrainingShape shape = Shape(n);
  const TrainingMemory without = EstimateMemory(Config(), shape, {}, kWhole);
  shape.head_ranks = 4;
  const TrainingMemory with = EstimateMemory(Config(), shape, {}, kWhole);
  const int64_t kv = int64_t{2} * 4 * 128, attended = int64_t{16} * 128;
  EXPECT_EQ(with.working, without.working + n * (int64_t{4} * 4 * (kv - int64_t{2} * 2 * 128) +
                                                 int64_t{2} * 2 * (3 * attended + kv)));
  EXPECT_EQ(with.saved, without.saved);
}

TEST(TrainingMemoryTest, OneRankNeedsNoBuckets) {
  TrainingShape shape = Shape(4096);
  shape.ranks = 1;
  EXPECT_EQ(EstimateMemory(Config(), shape, {}, kWhole).buckets, 0);
}

TEST(TrainingMemoryTest, LeavesAGpuWhatNoPlanCounts) {
  EXPECT_NEAR(static_cast<double>(ReservedBytes(140 * kGiB)) / kGiB, 11.2, 0.01);
  EXPECT_EQ(ReservedBytes(80 * kGiB), 7 * kGiB) << "a share of it is less than what is in use";
  EXPECT_NEAR(static_cast<double>(ReservedBytes(10 * kGiB)) / kGiB, 1.4, 0.01);
}

TEST(TrainingMemoryTest, FillsLessOfAMachineThanOfAGpu) {
  TrainingShape shape = Shape(65536);
  const MemoryLimits limits = {.device = 136 * kGiB, .host = 0};
  for (const bool is_host : {false, true}) {
    shape.device_is_host = is_host;
    const auto plan = PlanTraining(Config(), shape, {}, limits);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const int64_t comfortable = is_host ? 87 * limits.device / 100 : 95 * limits.device / 100;
    EXPECT_LE(plan->memory.total(), comfortable);
    RecomputePlan more = plan->recompute;
    ASSERT_LT(more.kept_layers, 36);
    ++more.kept_layers;
    EXPECT_GT(EstimateMemory(Config(), shape, more, kWhole).total(), comfortable);
  }
}

TEST(TrainingMemoryTest, KeepsAsMuchAsIsComfortable) {
  const auto limit = static_cast<int64_t>(ComfortableShare(false) * 136 * kGiB);
  int64_t kept_before = 36;
  for (const int64_t tokens : {16384, 65536, 131072, 262144}) {
    const auto plan = PlanTraining(Config(), Shape(tokens), {}, {.device = 136 * kGiB});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_LE(plan->memory.total(), 136 * kGiB);
    EXPECT_EQ(plan->sharding, kWhole);
    if (plan->recompute.recompute != Recompute::kFull) {
      EXPECT_LE(plan->memory.total(), limit);
      RecomputePlan more = plan->recompute;
      ++more.kept_layers;
      EXPECT_TRUE(more.kept_layers > 36 ||
                  EstimateMemory(Config(), Shape(tokens), more, kWhole).total() > limit);
    }
    EXPECT_LE(plan->recompute.kept_layers, kept_before);
    kept_before = plan->recompute.kept_layers;
  }
  EXPECT_EQ(kept_before, 0);
}

TEST(TrainingMemoryTest, FollowsTheJobsWish) {
  const auto plan =
      PlanTraining(Config(), Shape(16384), {.recompute = Recompute::kFull}, {.device = 132 * kGiB});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->recompute.recompute, Recompute::kFull);
  EXPECT_EQ(plan->recompute.kept_layers, 0);
}

TEST(TrainingMemoryTest, ShardsParametersWhereNothingElseFits) {
  ModelConfig config = Config();
  config.hidden_size = 5120;
  config.intermediate_size = 27648;
  config.layers = 64;
  config.heads = 40;
  config.kv_heads = 8;  // 32 billion parameters
  TrainingShape shape = Shape(4096);
  shape.ranks = 8;
  const auto plan = PlanTraining(config, shape, {}, {.device = 100 * kGiB, .host = 100 * kGiB});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->sharding, ParameterSharding::kShard);
  EXPECT_LT(plan->memory.parameters,
            EstimateMemory(config, shape, plan->recompute, kWhole).parameters / 4);
}

TEST(TrainingMemoryTest, RefusesWithTheArithmetic) {
  const auto plan = PlanTraining(Config(), Shape(131072), {.recompute = Recompute::kNone},
                                 {.device = 132 * kGiB});
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(plan.status().message()),
              AllOf(HasSubstr("131072 tokens a rank"), HasSubstr("132.0 GiB are there"),
                    HasSubstr("kept for backward"), HasSubstr("recompute: auto")));
  EXPECT_FALSE(PlanTraining(Config(), Shape(1 << 20), {}, {.device = 132 * kGiB}).ok());
}

// It has nobody to share its parameters with.
TEST(TrainingMemoryTest, OneRankNeedsItsWholeModel) {
  TrainingShape shape = Shape(4096);
  shape.ranks = 1;
  const TrainingMemory needed =
      EstimateMemory(Config(), shape, {.recompute = Recompute::kFull}, kWhole);
  const MemoryWishes wishes = {.offload = Offload::kNone};
  EXPECT_TRUE(PlanTraining(Config(), shape, wishes, {.device = needed.total()}).ok());
  const auto plan = PlanTraining(Config(), shape, wishes, {.device = needed.total() - 1});
  EXPECT_THAT(std::string(plan.status().message()),
              HasSubstr("a trainer needs " + DescribeMemory(needed)));
}

// One rank of four on a node, with what 132 GiB hold no policy of.
TrainingShape LongShape() {
  TrainingShape shape = Shape(524288);
  shape.ranks_per_node = 4;
  return shape;
}

TEST(TrainingMemoryTest, CountsWhatWaitsOnTheHost) {
  const int64_t n = 131072, layer = n * (2 * (2048 + 2048) + 4 * 16);
  const TrainingMemory device = EstimateMemory(Config(), Shape(n), {}, kWhole);
  EXPECT_EQ(device.host_total(), 0);
  TrainingShape shape = Shape(n);
  shape.ranks_per_node = 2;
  const TrainingMemory memory = EstimateMemory(Config(), shape, {.host_layers = 33}, kWhole);
  EXPECT_EQ(memory.saved, 3 * layer);
  EXPECT_EQ(memory.host_saved, 33 * layer);
  EXPECT_EQ(memory.total(), device.total() - 33 * layer);
  const ParameterLayout layout = MakeParameterLayout(Config());
  EXPECT_EQ(memory.host_copies, 12 * layout.ShardElements(4) + 4 * layout.elements / 2);
}

TEST(TrainingMemoryTest, UsesTheHostOnlyWhereNothingElseFits) {
  const MemoryLimits limits{.device = 120 * kGiB, .host = 400 * kGiB};
  const auto fits = PlanTraining(Config(), Shape(262144), {}, limits);
  ASSERT_TRUE(fits.ok()) << fits.status();
  EXPECT_EQ(fits->recompute.host_layers, 0);
  EXPECT_EQ(fits->memory.host_total(), 0);

  const auto plan = PlanTraining(Config(), LongShape(), {}, limits);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->recompute.recompute, Recompute::kFull);
  EXPECT_EQ(plan->sharding, kWhole);
  // No more layers than must be are on the host: one more on the device is too much for it.
  EXPECT_GT(plan->recompute.host_layers, 0);
  EXPECT_LT(plan->recompute.host_layers, 33);
  const auto comfortable = static_cast<int64_t>(ComfortableShare(false) * limits.device);
  EXPECT_LE(plan->memory.total(), comfortable);
  RecomputePlan less = plan->recompute;
  --less.host_layers;
  EXPECT_GT(EstimateMemory(Config(), LongShape(), less, kWhole).total(), comfortable);

  EXPECT_FALSE(PlanTraining(Config(), LongShape(), {.offload = Offload::kNone}, limits).ok());
}

TEST(TrainingMemoryTest, FillsTheDeviceWhereTheHostIsSmall) {
  const MemoryLimits wide{.device = 120 * kGiB, .host = 400 * kGiB};
  const auto plan = PlanTraining(Config(), LongShape(), {}, wide);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const MemoryLimits narrow{.device = wide.device, .host = plan->memory.host_total() - 1};
  const auto fuller = PlanTraining(Config(), LongShape(), {}, narrow);
  ASSERT_TRUE(fuller.ok()) << fuller.status();
  EXPECT_LT(fuller->recompute.host_layers, plan->recompute.host_layers);
  EXPECT_LE(fuller->memory.host_total(), narrow.host);
  EXPECT_LE(fuller->memory.total(), narrow.device);
}

TEST(TrainingMemoryTest, KeepsAllButAFewLayersOnTheHostWhereAsked) {
  const MemoryLimits limits{.device = 120 * kGiB, .host = 400 * kGiB};
  for (const auto recompute : {Recompute::kFull, Recompute::kAttentionOnly}) {
    const auto plan = PlanTraining(Config(), Shape(16384),
                                   {.recompute = recompute, .offload = Offload::kHost}, limits);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->recompute.recompute, recompute);
    EXPECT_EQ(plan->recompute.host_layers, 36 - kStagedLayers);
  }
  ModelConfig small = Config();
  small.layers = 2;
  const auto plan = PlanTraining(small, Shape(4096), {.offload = Offload::kHost}, limits);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->recompute.host_layers, 1);
  small.layers = 1;
  EXPECT_THAT(
      std::string(
          PlanTraining(small, Shape(4096), {.offload = Offload::kHost}, limits).status().message()),
      HasSubstr("one layer has nothing to keep in host memory"));
}

TEST(TrainingMemoryTest, RefusesWhatTheHostDoesNotHold) {
  const auto plan =
      PlanTraining(Config(), LongShape(), {}, {.device = 120 * kGiB, .host = 20 * kGiB});
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(plan.status().message()),
              AllOf(HasSubstr("with recompute full and 524288 tokens a rank"),
                    HasSubstr("in host memory"), HasSubstr("checkpoint and export"),
                    HasSubstr("host's memory (4 trainers a node) 20.0 GiB"),
                    HasSubstr("120.0 GiB are there")));
}

// A CPU rank, which has no second memory: the copies for checkpoints and the export lie beside the
// rest.
class CpuMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    auto config = LoadModelConfig("tests/golden/qwen2/config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    config_ = *std::move(config);
  }
  static TrainingShape Shape(int ranks, int64_t tokens) {
    return {.ranks = ranks, .tokens = tokens, .element_bytes = 4, .device_is_host = true};
  }
  TrainingMemory Estimate(int ranks, int64_t tokens, Recompute recompute) const {
    return EstimateMemory(config_, Shape(ranks, tokens), {.recompute = recompute}, kWhole);
  }
  ModelConfig config_;
};

TEST_F(CpuMemoryTest, OptimizerIsSharedAndActivationsFollowTheTokens) {
  const TrainingMemory one = Estimate(1, 1 << 20, Recompute::kNone);
  const TrainingMemory four = Estimate(4, 1 << 18, Recompute::kNone);
  const ParameterLayout layout = MakeParameterLayout(config_);
  // A rank alone adds gradients up where the optimizer reads them.
  EXPECT_EQ(one.parameters, 4 * layout.elements);
  EXPECT_EQ(one.optimizer, 16 * layout.elements);
  EXPECT_EQ(one.buckets, 0);
  EXPECT_EQ(one.copies, 12 * layout.elements + 4 * layout.elements);
  EXPECT_EQ(one.host_total(), 0);
  EXPECT_NEAR(static_cast<double>(one.optimizer) / four.optimizer, 4.0, 0.1);
  EXPECT_NEAR(static_cast<double>(one.saved + one.working) / (four.saved + four.working), 4.0, 0.1);
  EXPECT_GE(four.parameters, one.parameters);
  // Blocks of the gradient, as on GPUs, and what a peer sends of one.
  TrainingShape gpu = Shape(4, 1 << 18);
  gpu.device_is_host = false;
  const int64_t blocks = EstimateMemory(config_, gpu, {}, kWhole).buckets;
  EXPECT_EQ(four.buckets, blocks + 4 * layout.ShardElements(4));
  EXPECT_GT(four.total(), four.parameters + four.optimizer + four.buckets + four.saved);
  // The same where parameters are sharded, too.
  const TrainingMemory sharded =
      EstimateMemory(config_, Shape(4, 1 << 18), {}, ParameterSharding::kShard);
  EXPECT_EQ(sharded.buckets, four.buckets);
  EXPECT_EQ(EstimateMemory(config_, gpu, {}, ParameterSharding::kShard).buckets, blocks);
}

TEST_F(CpuMemoryTest, RecomputingTakesLess) {
  const int64_t none = Estimate(1, 1 << 20, Recompute::kNone).total();
  const int64_t attention_only = Estimate(1, 1 << 20, Recompute::kAttentionOnly).total();
  EXPECT_LT(Estimate(1, 1 << 20, Recompute::kFull).total(), attention_only);
  EXPECT_LT(attention_only, none);
}

TEST_F(CpuMemoryTest, TooLargeAModelIsAnErrorWithNumbers) {
  const int64_t needed = Estimate(4, 1 << 22, Recompute::kNone).total();
  const MemoryWishes wishes{.recompute = Recompute::kNone};
  EXPECT_TRUE(PlanTraining(config_, Shape(4, 1 << 22), wishes, {.device = needed}).ok());
  const absl::Status status =
      PlanTraining(config_, Shape(4, 1 << 22), {}, {.device = int64_t{1} << 30}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("does not fit"), HasSubstr("1.0 GiB are there"),
                    HasSubstr("trainers"), HasSubstr("checkpoint and export"),
                    testing::Not(HasSubstr("offload")), testing::Not(HasSubstr("host memory"))));
}

TEST_F(CpuMemoryTest, ShardsParametersButMovesNothing) {
  ModelConfig config = Config();
  const TrainingShape shape = Shape(8, 4096);
  const int64_t whole = EstimateMemory(config, shape, {}, kWhole).total();
  for (const Offload offload : {Offload::kNone, Offload::kAuto, Offload::kHost}) {
    const auto plan = PlanTraining(config, shape, {.offload = offload},
                                   {.device = whole - 1, .host = 1000 * kGiB});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->sharding, ParameterSharding::kShard);
    EXPECT_EQ(plan->recompute.host_layers, 0);
  }
}

// A policy for each number of layers is tried, of as many layers as there may be.
TEST(TrainingMemoryTest, ADeepModelIsPlannedLayerByLayer) {
  ModelConfig config = Config();
  config.layers = 10'000;
  config.hidden_size = config.intermediate_size = 64;
  config.vocab_size = 512;
  config.heads = config.kv_heads = 1;
  config.head_dim = 64;
  const MemoryLimits limits = {.device = 24 * kGiB, .host = 0};
  const auto plan = PlanTraining(config, Shape(8192), {}, limits);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->recompute.recompute, Recompute::kFull) << "the last that is tried";
  EXPECT_EQ(plan->memory.total(),
            EstimateMemory(config, Shape(8192), plan->recompute, plan->sharding).total());
}

TEST(TrainingMemoryTest, Describes) {
  EXPECT_EQ(DescribeRecompute(Config(), {.recompute = Recompute::kFull}), "full");
  EXPECT_EQ(DescribeRecompute(Config(), {.recompute = Recompute::kAttentionOnly, .kept_layers = 5}),
            "attention_only, 5 of 36 layers kept whole");
  EXPECT_EQ(
      DescribeRecompute(Config(), {.recompute = Recompute::kAttentionOnly, .kept_layers = 36}),
      "none");
  EXPECT_EQ(DescribeKept(Config(), {.recompute = Recompute::kFull}),
            "layer input, attention output, log-sum-exp: of all layers");
  EXPECT_EQ(DescribeKept(Config(), {.recompute = Recompute::kFull, .host_layers = 33}),
            "layer input, attention output, log-sum-exp: of 3 layers on the device, of 33 in host "
            "memory");
}

}  // namespace
}  // namespace ringleader::model
