// Casts by the owners of shards, against casts of whole weights.
#include "worker/optim/sharded/sharded_casts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "worker/comm/testing/local_communicator.h"
#include "worker/model/token_ops/cpu_token_ops.h"
#include "worker/optim/cpu_shard_device.h"
#include "worker/optim/sharded/sharded_adamw.h"
#include "worker/optim/sharded/testing/gathered_casts.h"
#include "worker/optim/sharded/testing/small_model.h"

namespace ringleader::optim {
namespace {

using comm::Communicator;
using comm::testing::RunRanks;
using model::CastLayers;
using torch::Tensor;

model::ModelConfig WithAllBiases() {
  model::ModelConfig config = SmallModel();
  config.attention_output_bias = config.mlp_bias = true;
  return config;
}

// One layer whose down projection has rows of 512.
model::ModelConfig WithLongRows() {
  model::ModelConfig config = SmallModel();
  config.vocab_size = 16;
  config.hidden_size = 16;
  config.heads = 2;
  config.kv_heads = 1;
  config.intermediate_size = 512;
  config.layers = 1;
  return config;
}

// What `ranks` ranks come to have of the casts of `values`, the flat buffer, is what one that holds
// them whole makes of them.
void ExpectCastsOfTheWhole(const model::ModelConfig& config, CastLayers layers, int ranks,
                           std::vector<float> values) {
  const model::ParameterLayout layout = model::MakeParameterLayout(config);
  const int64_t elements = layout.ShardElements(ranks);
  values.resize(layout.PaddedElements(ranks));
  const Tensor flat = torch::tensor(values);
  const Tensor codes = torch::zeros({flat.numel()}, torch::kByte);
  std::mutex mutex;
  std::vector<std::vector<model::CastBlock>> blocks;  // of each rank, without codes
  RunRanks(ranks, [&](Communicator& comm) {
    CpuShardDevice device(comm, /*threads=*/1);
    const auto ops = model::NewCpuTokenOps(/*threads=*/1);
    ShardedCasts casts(layout, layers, *ops, device,
                       flat.narrow(0, comm.rank() * elements, elements), torch::kFloat);
    const absl::Status status = casts.Update(/*version=*/1, [&](int64_t begin, int64_t end) {
      EXPECT_LE(casts.begin(), begin);
      EXPECT_LE(end, casts.end());
      return codes.narrow(0, begin, end - begin);
    });
    ASSERT_TRUE(status.ok()) << status;
    std::vector<model::CastBlock> of_rank;
    for (int64_t layer = layers.begin; layer < layers.end; ++layer) {
      of_rank.push_back(casts.Block(layer, torch::zeros({1}, torch::kByte)));
    }
    const std::lock_guard lock(mutex);
    blocks.push_back(std::move(of_rank));
  });
  const auto ops = model::NewCpuTokenOps(/*threads=*/1);
  for (std::vector<model::CastBlock>& of_rank : blocks) {
    for (int64_t layer = layers.begin; layer < layers.end; ++layer) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, layer " << layer);
      const model::ParameterBlock& range = layout.blocks[layer + 1];
      model::CastBlock& block = of_rank[layer - layers.begin];
      block.codes = codes.narrow(0, range.begin, range.elements).view(torch::kFloat8_e4m3fn);
      ExpectCastsOf(layout, layer, block, flat, *ops);
    }
  }
}

TEST(ShardedCastsTest, AreThoseOfTheWholeWeightsWhereverShardsCutRows) {
  for (const model::ModelConfig& config : {SmallModel(), WithAllBiases()}) {
    const model::ParameterLayout layout = model::MakeParameterLayout(config);
    const std::vector<float> values = Random(layout, layout.elements, 5);
    for (const int ranks : {2, 3, 5, 7, 24}) {
      ExpectCastsOfTheWhole(config, {.begin = 0, .end = 3}, ranks, values);
      ExpectCastsOfTheWhole(config, {.begin = 1, .end = 2}, ranks, values);
    }
  }
}

TEST(ShardedCastsTest, RowsMayReachOverSeveralShards) {
  const model::ParameterLayout layout = model::MakeParameterLayout(WithLongRows());
  std::vector<float> values = Random(layout, layout.elements, 6);
  // The largest of a row at its beginning, in its middle, at its end.
  const model::ParameterSlot& down = *layout.Find("model.layers.0.mlp.down_proj.weight");
  for (const int at : {0, 512 + 250, 2 * 512 + 511}) values[down.offset + at] = -1000.0f;
  constexpr int kRanks = 120;
  ASSERT_LT(layout.ShardElements(kRanks), 256) << "a shard lies within a row";
  ExpectCastsOfTheWhole(WithLongRows(), {.begin = 0, .end = 1}, kRanks, values);
}

// Rows that are not numbers are none as a whole, whichever rank has the value that is none.
TEST(ShardedCastsTest, RowsThatAreNoNumbersAreNoneOnAllRanks) {
  const model::ParameterLayout layout = model::MakeParameterLayout(SmallModel());
  for (const int ranks : {2, 5}) {
    std::vector<float> values = Random(layout, layout.elements, 7);
    const int64_t border = layout.ShardElements(ranks);
    const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                         std::numeric_limits<float>::infinity()};
    for (int rank = 1; rank < ranks; ++rank) {
      values[rank * border - rank % 2] = bad[rank % 2];  // before the border or behind it
    }
    const model::ParameterSlot& query = *layout.Find("model.layers.1.self_attn.q_proj.weight");
    std::fill_n(values.begin() + query.offset, 32, 0.0f);
    ExpectCastsOfTheWhole(SmallModel(), {.begin = 0, .end = 3}, ranks, values);
  }
}

// A layer on its way takes a byte an element, and nothing is gathered twice.
TEST(ShardedCastsTest, AQuarterOfTheBytesOfFloatsIsGathered) {
  const model::ParameterLayout layout = model::MakeParameterLayout(SmallModel());
  constexpr int kRanks = 3;
  const std::vector<float> values = Random(layout, layout.PaddedElements(kRanks), 8);
  std::atomic<uint64_t> sent = 0;
  std::barrier together(kRanks);
  RunRanks(comm::testing::CountedCommunicators(kRanks, &sent), [&](Communicator& comm) {
    CpuShardDevice device(comm, /*threads=*/1);
    const auto ops = model::NewCpuTokenOps(/*threads=*/1);
    const int64_t elements = layout.ShardElements(kRanks);
    const auto adamw =
        ShardedAdamW::Create({}, layout, device, torch::kFloat,
                             std::span(values).subspan(comm.rank() * elements, elements),
                             model::ParameterSharding::kShard);
    ASSERT_TRUE(adamw.ok()) << adamw.status();
    (*adamw)->HoldCasts(*ops, {.begin = 0, .end = 3});
    // What all ranks send in body().
    const auto sent_in = [&](auto body) {
      together.arrive_and_wait();
      const uint64_t before = sent;
      together.arrive_and_wait();
      body();
      together.arrive_and_wait();
      return sent - before;
    };
    // The three layers forward, twice: the first takes the third's place, and the second's stays.
    const auto pass = [&] {
      for (int round = 0; round < 2; ++round) (*adamw)->PassForward();
    };
    pass();
    const uint64_t casts = sent_in(pass);
    (*adamw)->SetReadsCasts(false);
    EXPECT_THROW((*adamw)->CastParameters(1, 2), c10::Error);
    pass();
    const uint64_t parameters = sent_in(pass);
    (*adamw)->SetReadsCasts(true);
    EXPECT_THROW((*adamw)->Parameters(1, 2), c10::Error);
    const uint64_t again = sent_in(pass);  // where no place has what is wanted
    if (comm.rank() > 0) return;
    const uint64_t layer = layout.blocks[1].elements * (kRanks - 1);
    EXPECT_EQ(casts, 4 * layer);
    EXPECT_EQ(parameters, 4 * 4 * layer);
    EXPECT_EQ(again, 5 * layer) << "scales of the same version are not shared again";
  });
}

// Whatever changes the parameters, and however they were read before, casts are of what they are.
TEST(ShardedCastsTest, AreOfTheParametersAsTheyAre) {
  using enum model::ParameterSharding;
  const model::ModelConfig config = WithAllBiases();
  const model::ParameterLayout layout = model::MakeParameterLayout(config);
  for (const auto& [sharding, ranks] :
       {std::pair{kWhole, 1}, {kWhole, 2}, {kWhole, 7}, {kShard, 2}, {kShard, 7}}) {
    SCOPED_TRACE(::testing::Message() << ranks << " ranks, sharded: " << (sharding == kShard));
    const std::vector<float> start = Random(layout, layout.PaddedElements(ranks), 9);
    RunRanks(ranks, [&, sharding = sharding, ranks = ranks](Communicator& comm) {
      CpuShardDevice device(comm, /*threads=*/1);
      const auto ops = model::NewCpuTokenOps(/*threads=*/1);
      const int64_t elements = layout.ShardElements(ranks);
      auto created = ShardedAdamW::Create(
          {}, layout, device, torch::kFloat,
          std::span(start).subspan(comm.rank() * elements, elements), sharding);
      ASSERT_TRUE(created.ok()) << created.status();
      ShardedAdamW& adamw = **created;
      std::vector<float> before(layout.elements);
      const auto expect_casts = [&](const char* after, bool changed = true) {
        SCOPED_TRACE(after);
        std::vector<float> master(layout.elements);
        ASSERT_TRUE(adamw.GatherMaster(master.data()).ok());
        EXPECT_EQ(master != before, changed);
        before = master;
        const Tensor flat = torch::tensor(master);
        for (int block = 0; block <= config.layers + 1; ++block) {
          if (block == 2) {  // the layer that is cast
            ExpectCastsOf(layout, 1, adamw.CastParameters(block, block + 1), flat, *ops);
            EXPECT_THROW(adamw.Parameters(block, block + 1), c10::Error);
            continue;
          }
          const model::ParameterBlock& range = layout.blocks[block];
          EXPECT_TRUE(torch::equal(adamw.Parameters(block, block + 1),
                                   flat.narrow(0, range.begin, range.elements)));
          EXPECT_THROW(adamw.CastParameters(block, block + 1), c10::Error);
        }
      };
      const auto step = [&](uint32_t seed) {
        adamw.ZeroGradients();
        AddGradients(adamw, layout, Random(layout, layout.elements, seed));
        ASSERT_TRUE(adamw.Step(0.01, torch::ones({}), 1).ok());
      };
      adamw.HoldCasts(*ops, {.begin = 1, .end = 2});
      EXPECT_THROW(adamw.HoldCasts(*ops, {.begin = 1, .end = 2}), c10::Error);
      expect_casts("the start");
      const absl::StatusOr<OptimizerShard> shard = TakeShard(adamw);
      ASSERT_TRUE(shard.ok()) << shard.status();
      for (const uint32_t seed : {101, 102}) {
        step(seed);
        expect_casts("a step");
        expect_casts("reading", /*changed=*/false);
      }
      // One that is skipped leaves them as they were.
      adamw.ZeroGradients();
      AddGradients(adamw, layout,
                   std::vector<float>(layout.elements, std::numeric_limits<float>::quiet_NaN()));
      const auto skipped = adamw.Step(0.01, torch::ones({}), 1);
      ASSERT_TRUE(skipped.ok()) << skipped.status();
      EXPECT_TRUE(skipped->skipped);
      expect_casts("a step that is skipped", /*changed=*/false);
      adamw.SetReadsCasts(false);
      EXPECT_EQ(adamw.Parameters(2, 3).numel(), layout.blocks[2].elements);
      adamw.SetReadsCasts(true);
      expect_casts("parameters were read", /*changed=*/false);
      adamw.SetReadsCasts(false);
      step(103);
      const model::ParameterBlock& range = layout.blocks[2];
      const Tensor read = adamw.Parameters(2, 3).clone();
      adamw.SetReadsCasts(true);
      expect_casts("a step that read none");
      EXPECT_TRUE(torch::equal(read, torch::tensor(before).narrow(0, range.begin, range.elements)));
      ASSERT_TRUE(adamw.Restore(*shard, 0).ok());
      expect_casts("restoring");
    });
  }
}

}  // namespace
}  // namespace ringleader::optim
