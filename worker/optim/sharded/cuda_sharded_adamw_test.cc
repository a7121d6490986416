// AdamW on a GPU against the CPU's, over one rank and several.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <thread>

#include "absl/time/clock.h"
#include "kernels/ops/cuda_call.h"
#include "worker/comm/testing/local_device_communicator.h"
#include "worker/comm/testing/run_ranks.h"
#include "worker/model/decoder/decoder.h"
#include "worker/model/testing/dense_context_attention.h"
#include "worker/model/testing/need_gpu.h"
#include "worker/model/testing/plain_token_ops.h"
#include "worker/model/token_ops/cuda_token_ops.h"
#include "worker/optim/cpu_shard_device.h"
#include "worker/optim/cuda_shard_device.h"
#include "worker/optim/shard_copier.h"
#include "worker/optim/sharded/sharded_adamw.h"
#include "worker/optim/sharded/testing/gathered_casts.h"
#include "worker/optim/sharded/testing/small_model.h"

namespace ringleader::optim {
namespace {

using torch::Tensor;

// Padded for `ranks`.
std::vector<float> RandomShards(const model::ParameterLayout& layout, int ranks, uint32_t seed) {
  return Random(layout, layout.PaddedElements(ranks), seed);
}

Tensor Loss(double value) {
  return torch::full({}, value, torch::dtype(torch::kDouble).device(torch::kCUDA));
}

class ShardedAdamWTest : public model::GpuTest {
 protected:
  const model::ParameterLayout layout_ = model::MakeParameterLayout(SmallModel());
};

// A GPU's optimizer, on its own or over ranks that share the GPU.
struct OnGpu {
  OnGpu(const AdamWOptions& options, const model::ParameterLayout& layout,
        comm::DeviceCommunicator* comm, torch::ScalarType type, std::span<const float> start,
        model::ParameterSharding sharding = model::ParameterSharding::kWhole) {
    auto created = CudaShardDevice::Create(comm);
    TORCH_CHECK(created.ok(), std::string(created.status().message()));
    device = *std::move(created);
    auto optimizer = ShardedAdamW::Create(options, layout, *device, type, start, sharding);
    TORCH_CHECK(optimizer.ok(), std::string(optimizer.status().message()));
    adamw = *std::move(optimizer);
  }
  ShardedAdamW& operator*() { return *adamw; }
  ShardedAdamW* operator->() { return adamw.get(); }

  std::unique_ptr<CudaShardDevice> device;
  std::unique_ptr<ShardedAdamW> adamw;
};

// The same on the CPU, on one rank.
struct OnCpu {
  OnCpu(comm::Communicator& comm, const AdamWOptions& options, const model::ParameterLayout& layout,
        std::span<const float> start)
      : device(comm, /*threads=*/1),
        adamw(ShardedAdamW::Create(options, layout, device, torch::kFloat, start).value()) {}
  ShardedAdamW& operator*() { return *adamw; }
  ShardedAdamW* operator->() { return adamw.get(); }

  CpuShardDevice device;
  std::unique_ptr<ShardedAdamW> adamw;
};

// The CPU's optimizer over the same gradients.
std::vector<float> ParametersOnCpu(const model::ParameterLayout& layout,
                                   const AdamWOptions& options, int steps,
                                   std::vector<double>* norms) {
  std::vector<float> parameters(layout.elements);
  comm::testing::RunRanks(1, [&](comm::Communicator& comm) {
    OnCpu adamw(comm, options, layout, RandomShards(layout, 1, 1));
    for (int step = 0; step < steps; ++step) {
      adamw->ZeroGradients();
      AddGradients(*adamw, layout, RandomShards(layout, 1, 100 + step), 1.0f);
      const auto result = adamw->Step(0.01, torch::ones({}), 1);
      ASSERT_TRUE(result.ok()) << result.status();
      norms->push_back(result->gradient_norm);
    }
    ASSERT_TRUE(adamw->GatherMaster(parameters.data()).ok());
  });
  return parameters;
}

TEST_F(ShardedAdamWTest, FollowsTheCpu) {
  for (const double clip_norm : {0.0, 1.0}) {
    const AdamWOptions options{.weight_decay = 0.3, .clip_norm = clip_norm};
    std::vector<double> norms;
    const std::vector<float> expected = ParametersOnCpu(layout_, options, 5, &norms);
    const std::vector<float> start = RandomShards(layout_, 1, 1);
    OnGpu adamw(options, layout_, nullptr, torch::kFloat, start);
    for (int step = 0; step < 5; ++step) {
      adamw->ZeroGradients();
      // Two micro-batches of 4 tokens each: gradients of sums, the step is of the mean.
      const std::vector<float> gradients = RandomShards(layout_, 1, 100 + step);
      for (int i = 0; i < 2; ++i) AddGradients(*adamw, layout_, gradients, 4.0f);
      const auto result = adamw->Step(0.01, Loss(16.0), 8);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_NEAR(result->gradient_norm, norms[step], 1e-4 * norms[step]);
      EXPECT_DOUBLE_EQ(result->loss, 2.0);
      EXPECT_DOUBLE_EQ(result->tokens, 8.0);
      EXPECT_FALSE(result->skipped);
    }
    EXPECT_EQ(adamw->updates(), 5);
    const Tensor parameters =
        torch::cat({adamw->Parameters(0, -1), adamw->Parameters(1, -1)}).cpu();
    for (int64_t i = 0; i < parameters.numel(); ++i) {
      ASSERT_NEAR(parameters[i].item<float>(), expected[i], 1e-5) << "element " << i;
    }
  }
}

TEST_F(ShardedAdamWTest, ParametersAreTheMasterWeightsRounded) {
  const std::vector<float> start = RandomShards(layout_, 1, 1);
  OnGpu adamw({}, layout_, nullptr, torch::kBFloat16, start);
  AddGradients(*adamw, layout_, RandomShards(layout_, 1, 5), 1.0f);
  ASSERT_TRUE(adamw->Step(0.1, Loss(1.0), 1).ok());
  const absl::StatusOr<OptimizerShard> shard = TakeShard(*adamw);
  ASSERT_TRUE(shard.ok()) << shard.status();
  Tensor master = torch::from_blob(const_cast<float*>(shard->master.data()), {shard->elements()});
  EXPECT_FALSE(torch::equal(master, torch::tensor(start)));
  for (size_t b = 0; b < layout_.blocks.size(); ++b) {
    const model::ParameterBlock& range = layout_.blocks[b];
    EXPECT_TRUE(torch::equal(adamw->Parameters(static_cast<int>(b), -1).cpu(),
                             master.narrow(0, range.begin, range.elements).to(torch::kBFloat16)));
  }
  std::vector<float> gathered(layout_.elements, -1.0f);
  ASSERT_TRUE(adamw->GatherMaster(gathered.data()).ok());
  EXPECT_THAT(gathered, testing::ElementsAreArray(shard->master.begin(),
                                                  shard->master.begin() + layout_.elements));
}

TEST_F(ShardedAdamWTest, ABadGradientSkipsTheStepAndIsNamed) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const std::vector<float> start = RandomShards(layout_, 1, 1);
    OnGpu adamw({}, layout_, nullptr, torch::kFloat, start);
    std::vector<float> gradients = RandomShards(layout_, 1, 2);
    const model::ParameterSlot& slot = layout_.slots[7];
    gradients[slot.offset + 1] = bad;
    AddGradients(*adamw, layout_, gradients, 1.0f);
    const auto step = adamw->Step(0.1, Loss(1.0), 1);
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_TRUE(step->skipped);
    EXPECT_EQ(adamw->updates(), 0);
    EXPECT_EQ(adamw->NonFiniteParameter(), 7);
    const absl::StatusOr<OptimizerShard> shard = TakeShard(*adamw);
    ASSERT_TRUE(shard.ok()) << shard.status();
    EXPECT_THAT(shard->master, testing::ElementsAreArray(start));
    EXPECT_THAT(shard->first_moment, testing::Each(0.0f));
  }
}

TEST_F(ShardedAdamWTest, AStepWithoutTokensChangesNothing) {
  const std::vector<float> start = RandomShards(layout_, 1, 1);
  OnGpu adamw({}, layout_, nullptr, torch::kFloat, start);
  const auto step = adamw->Step(0.1, Loss(0.0), 0);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_TRUE(step->skipped);
  EXPECT_EQ(step->tokens, 0.0);
  EXPECT_THAT(TakeShard(*adamw)->master, testing::ElementsAreArray(start));
}

TEST_F(ShardedAdamWTest, SumsAreExactBeyondWhatFp32Counts) {
  OnGpu adamw({}, layout_, nullptr, torch::kFloat, RandomShards(layout_, 1, 1));
  constexpr int64_t kLabels = (int64_t{1} << 24) + 1;
  const auto step = adamw->Step(0.1, Loss(3.0 * kLabels), kLabels);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->tokens, static_cast<double>(kLabels));
  EXPECT_EQ(step->loss, 3.0);
}

std::span<const float> ShardOf(const model::ParameterLayout& layout, int ranks, int rank,
                               const std::vector<float>& values) {
  const int64_t elements = layout.ShardElements(ranks);
  return std::span(values).subspan(rank * elements, elements);
}

TEST_F(ShardedAdamWTest, FollowsTheCpuOnAnyNumberOfRanks) {
  std::vector<double> norms;
  const std::vector<float> expected = ParametersOnCpu(layout_, {}, 3, &norms);
  for (const int ranks : {1, 2, 3, 4}) {
    comm::testing::RunDeviceRanks(ranks, [&](comm::DeviceCommunicator& comm) {
      const std::vector<float> start = RandomShards(layout_, ranks, 1);
      OnGpu adamw({}, layout_, &comm, torch::kFloat, ShardOf(layout_, ranks, comm.rank(), start));
      for (int step = 0; step < 3; ++step) {
        adamw->ZeroGradients();
        // Rank r sums r + 1 tokens: what it adds is its part of the sum of all.
        const int64_t tokens = ranks * (ranks + 1) / 2;
        const std::vector<float> gradients = RandomShards(layout_, ranks, 100 + step);
        const auto own = static_cast<float>(comm.rank() + 1);
        for (int i = 0; i < 2; ++i) AddGradients(*adamw, layout_, gradients, 0.5f * own);
        const auto result = adamw->Step(0.01, Loss(3.0 * own), comm.rank() + 1);
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_NEAR(result->gradient_norm, norms[step], 1e-4 * norms[step]);
        EXPECT_DOUBLE_EQ(result->tokens, static_cast<double>(tokens));
        EXPECT_NEAR(result->loss, 3.0, 1e-6);
      }
      std::vector<float> master(layout_.elements);
      ASSERT_TRUE(adamw->GatherMaster(master.data()).ok());
      for (size_t b = 0; b < layout_.blocks.size(); ++b) {
        const model::ParameterBlock& range = layout_.blocks[b];
        const Tensor parameters = adamw->Parameters(static_cast<int>(b), -1).cpu();
        for (int64_t i = 0; i < range.elements; ++i) {
          ASSERT_NEAR(parameters[i].item<float>(), expected[range.begin + i], 1e-5);
          ASSERT_EQ(parameters[i].item<float>(), master[range.begin + i]);
        }
      }
    });
  }
}

// A model over ranks that see a sequence each, and on one rank that sees all of them in turn.
TEST_F(ShardedAdamWTest, RanksTrainTheModelThatOneRankTrains) {
  const auto train = [&](int ranks, model::ParameterSharding sharding) {
    constexpr int kSequences = 12, kSteps = 3;
    std::vector<float> result(layout_.elements);
    comm::testing::RunDeviceRanks(ranks, [&](comm::DeviceCommunicator& comm) {
      std::vector<float> start = RandomShards(layout_, ranks, 1);
      for (float& value : start) value *= 0.1f;
      OnGpu adamw({.clip_norm = 0.1}, layout_, &comm, torch::kFloat,
                  ShardOf(layout_, ranks, comm.rank(), start), sharding);
      const model::PlainTokenOps ops;
      model::Decoder decoder(SmallModel(), ops, *adamw, {});
      model::DenseContextAttention attention;
      for (int step = 0; step < kSteps; ++step) {
        adamw->ZeroGradients();
        Tensor loss = Loss(0.0);
        int64_t count = 0;
        for (int s = comm.rank(); s < kSequences; s += ranks) {
          const int64_t n = 24;
          const Tensor tokens = ((torch::arange(n) * (s + 3) + step * 7) % 61).to(torch::kCUDA);
          loss += decoder.ForwardBackward({.tokens = tokens,
                                           .positions = torch::arange(n, torch::kCUDA),
                                           .labels = tokens.roll(-1),
                                           .sequence_length = n},
                                          attention);
          count += n;
        }
        const auto update = adamw->Step(0.01, loss, count);
        ASSERT_TRUE(update.ok()) << update.status();
        EXPECT_FALSE(update->skipped);
      }
      ASSERT_TRUE(adamw->GatherMaster(comm.rank() == 0 ? result.data() : nullptr).ok());
    });
    return result;
  };
  const std::vector<float> expected = train(1, model::ParameterSharding::kWhole);
  for (const auto& [ranks, sharding] : {std::pair(2, model::ParameterSharding::kWhole),
                                        std::pair(3, model::ParameterSharding::kWhole),
                                        std::pair(2, model::ParameterSharding::kShard),
                                        std::pair(4, model::ParameterSharding::kShard)}) {
    const std::vector<float> actual = train(ranks, sharding);
    const Tensor a = torch::tensor(actual), e = torch::tensor(expected);
    EXPECT_LE((a - e).abs().max().item<double>(), 2e-4) << ranks << " ranks";
    EXPECT_GT(e.abs().max().item<double>(), 0.0);
  }
}

// Ranks cast their parts, rows that borders cut among them, to the same bits as one its whole
// weights.
TEST_F(ShardedAdamWTest, GathersTheCastsOfWholeWeights) {
  model::ModelConfig config = SmallModel();
  config.intermediate_size = 48;  // tensor cores take multiples of 16
  config.attention_output_bias = config.mlp_bias = true;
  const model::ParameterLayout layout = model::MakeParameterLayout(config);
  for (const int ranks : {4, 7, 8}) {
    std::vector<float> start = RandomShards(layout, ranks, 1);
    // The first element of a row that a border cuts is its largest: only one rank has it.
    int cuts = 0;
    for (const model::ParameterSlot& slot : layout.slots) {
      for (int64_t border = layout.ShardElements(ranks); border < layout.elements;
           border += layout.ShardElements(ranks)) {
        const int64_t place = border - slot.offset;
        if (!slot.is_matrix() || place < 0 || place >= slot.elements) continue;
        const int64_t rest = place % slot.shape[1];
        if (rest == 0) continue;
        start[border - rest] = -1000.0f;
        ++cuts;
      }
    }
    ASSERT_GT(cuts, 0) << ranks << " ranks cut no row";
    for (const auto sharding :
         {model::ParameterSharding::kWhole, model::ParameterSharding::kShard}) {
      comm::testing::RunDeviceRanks(ranks, [&](comm::DeviceCommunicator& comm) {
        OnGpu adamw({}, layout, &comm, torch::kBFloat16, ShardOf(layout, ranks, comm.rank(), start),
                    sharding);
        const auto ops = model::NewCudaTokenOps();
        adamw->HoldCasts(*ops, {.begin = 0, .end = config.layers});
        for (int step = 0; step < 3; ++step) {
          std::vector<float> master(layout.elements);
          ASSERT_TRUE(adamw->GatherMaster(master.data()).ok());
          const Tensor flat = torch::tensor(master).to(torch::kCUDA, torch::kBFloat16);
          for (int layer = 0; layer < config.layers; ++layer) {
            ExpectCastsOf(layout, layer, adamw->CastParameters(layer + 1, layer + 2), flat, *ops);
          }
          adamw->SetReadsCasts(step != 1);  // in the next
          for (const int block : {0, 1, static_cast<int>(config.layers) + 1}) {
            if (block == 1 && step != 1) continue;
            const model::ParameterBlock& range = layout.blocks[block];
            EXPECT_TRUE(SameBits(adamw->Parameters(block, -1),
                                 flat.narrow(0, range.begin, range.elements)));
          }
          adamw->ZeroGradients();
          AddGradients(*adamw, layout, RandomShards(layout, ranks, 100 + step));
          ASSERT_TRUE(adamw->Step(0.01, Loss(1.0), 1).ok());
          adamw->SetReadsCasts(true);
        }
      });
    }
  }
}

// A shard is the checkpoint's: the CPU's optimizer goes on with it, and the other way round.
TEST_F(ShardedAdamWTest, TheCpuGoesOnWithItsShard) {
  std::vector<double> norms;
  const std::vector<float> expected = ParametersOnCpu(layout_, {}, 4, &norms);
  const std::vector<float> start = RandomShards(layout_, 1, 1);
  OnGpu adamw({}, layout_, nullptr, torch::kFloat, start);
  const auto on_gpu = [&](int step) {
    adamw->ZeroGradients();
    AddGradients(*adamw, layout_, RandomShards(layout_, 1, 100 + step), 1.0f);
    ASSERT_TRUE(adamw->Step(0.01, Loss(1.0), 1).ok());
  };
  on_gpu(0);
  comm::testing::RunRanks(1, [&](comm::Communicator& comm) {
    OnCpu cpu(comm, {}, layout_, RandomShards(layout_, 1, 9));
    absl::StatusOr<OptimizerShard> shard = TakeShard(*adamw);
    ASSERT_TRUE(shard.ok()) << shard.status();
    ASSERT_TRUE(cpu->Restore(*shard, adamw->updates()).ok());
    for (const int step : {1, 2}) {
      cpu->ZeroGradients();
      AddGradients(*cpu, layout_, RandomShards(layout_, 1, 100 + step), 1.0f);
      ASSERT_TRUE(cpu->Step(0.01, torch::ones({}), 1).ok());
    }
    ASSERT_TRUE(adamw->Restore(*TakeShard(*cpu), cpu->updates()).ok());
  });
  on_gpu(3);
  const absl::StatusOr<OptimizerShard> shard = TakeShard(*adamw);
  ASSERT_TRUE(shard.ok()) << shard.status();
  for (int64_t i = 0; i < layout_.elements; ++i) {
    ASSERT_NEAR(shard->master[i], expected[i], 1e-5) << "element " << i;
  }
  OptimizerShard other = *shard;
  other.begin = 16;
  EXPECT_EQ(adamw->Restore(other, 1).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ShardedAdamWTest, ASnapshotIsOfItsTimeAndTheNextUpdateWaitsForIt) {
  const std::vector<float> start = RandomShards(layout_, 1, 1);
  OnGpu adamw({}, layout_, nullptr, torch::kFloat, start);
  absl::StatusOr<ShardSource> source = adamw->Snapshot();
  ASSERT_TRUE(source.ok()) << source.status();
  absl::StatusOr<OptimizerShard> shard;
  std::thread copier([&] {
    absl::SleepFor(absl::Milliseconds(200));
    shard = (*std::move(source))();
  });
  AddGradients(*adamw, layout_, RandomShards(layout_, 1, 2), 1.0f);
  const absl::Time begin = absl::Now();
  EXPECT_TRUE(adamw->Step(0.1, Loss(1.0), 1).ok());
  EXPECT_GT(absl::Now() - begin, absl::Milliseconds(100));
  copier.join();
  ASSERT_TRUE(shard.ok()) << shard.status();
  EXPECT_THAT(shard->master, testing::ElementsAreArray(start));
  EXPECT_THAT(shard->second_moment, testing::Each(0.0f));
  EXPECT_NE(TakeShard(*adamw)->master, start);
  // One that nobody calls holds up nothing.
  ASSERT_TRUE(adamw->Snapshot().ok());
  EXPECT_LT(adamw->AwaitSnapshot(), 0.1);
}

TEST_F(ShardedAdamWTest, CopiesInPieces) {
  const Tensor values = torch::arange(20'000'001, torch::dtype(torch::kFloat).device(torch::kCUDA));
  ShardCopier copier;
  std::vector<float> copy = {1.0f};
  ASSERT_TRUE(copier.Begin(kernels::ops::Stream()).ok());
  const ShardCopier::Section section = {values.const_data_ptr<float>(), &copy};
  ASSERT_TRUE(copier.Copy({&section, 1}, values.numel()).ok());
  copier.End();
  EXPECT_TRUE(torch::equal(torch::tensor(copy), values.cpu()));
}

}  // namespace
}  // namespace ringleader::optim
