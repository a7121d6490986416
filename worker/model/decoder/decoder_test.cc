// The decoder on the CPU, in chunks that do not divide the tokens: what is wrong here is wrong on
// GPUs too (cuda_decoder_test.cc).
#include "worker/model/decoder/decoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "worker/model/testing/dense_context_attention.h"
#include "worker/model/testing/flat_store.h"
#include "worker/model/testing/golden_batch.h"
#include "worker/model/token_ops/cpu_token_ops.h"

namespace ringleader::model {
namespace {

struct Case {
  std::string name;
  Recompute recompute;
};

class DecoderTest : public testing::TestWithParam<Case> {};

TEST_P(DecoderTest, LogitsLossAndGradientsEqualTransformers) {
  const Golden golden = LoadGolden(GetParam().name);
  const auto ops = NewCpuTokenOps(/*threads=*/2);
  FlatStore store(golden.layout, golden.values, torch::kCPU, torch::kFloat);
  // Chunks that do not divide the tokens.
  Decoder decoder(golden.config, *ops, store,
                  {.recompute = {.recompute = GetParam().recompute, .kept_layers = 1},
                   .mlp_chunk_tokens = 7,
                   .loss_chunk_tokens = 5});
  const TokenBatch batch = BatchOf(golden);
  DenseContextAttention attention;

  const torch::Tensor logits = decoder.Logits(batch, attention);
  EXPECT_LE((logits - golden.expected.at("logits")).abs().max().item<double>(), 1e-4);
  const double expected_loss = golden.expected.at("loss").item<double>();
  EXPECT_NEAR(decoder.Score(batch, attention).losses.sum().item<double>(), expected_loss, 2e-3);
  EXPECT_TRUE(store.closed().empty()) << "evaluation has no gradients";

  // Runs twice, because micro-batches add up.
  for (int i = 0; i < 2; ++i) {
    EXPECT_NEAR(decoder.ForwardBackward(batch, attention).item<double>(), expected_loss, 2e-3);
  }
  EXPECT_TRUE(store.open().empty());
  for (const ParameterSlot& slot : golden.layout.slots) {
    const torch::Tensor gradient =
        store.gradients().narrow(0, slot.offset, slot.elements).view(slot.shape) / 2;
    EXPECT_LE(RelativeError(gradient, golden.expected.at("grad." + slot.name)), 1e-3) << slot.name;
  }
}

TEST_P(DecoderTest, EveryBlockClosesOnceFromTheBack) {
  const Golden golden = LoadGolden(GetParam().name);
  const auto ops = NewCpuTokenOps(/*threads=*/2);
  FlatStore store(golden.layout, golden.values, torch::kCPU, torch::kFloat);
  Decoder decoder(golden.config, *ops, store, {.recompute = {.recompute = GetParam().recompute}});
  DenseContextAttention attention;
  decoder.ForwardBackward({.tokens = torch::arange(8),
                           .positions = torch::arange(8),
                           .labels = torch::arange(8),
                           .sequence_length = 8},
                          attention);
  std::vector<int> from_the_back(golden.layout.blocks.size());
  for (size_t i = 0; i < from_the_back.size(); ++i) {
    from_the_back[i] = static_cast<int>(from_the_back.size() - 1 - i);
  }
  EXPECT_EQ(store.closed(), from_the_back);
}

TEST(ParameterBlocksTest, CoverTheBufferInOrder) {
  for (const std::string& name : GoldenNames()) {
    const Golden golden = LoadGolden(name);
    ASSERT_EQ(static_cast<int64_t>(golden.layout.blocks.size()), golden.config.layers + 2);
    int64_t end = 0;
    for (const ParameterBlock& block : golden.layout.blocks) {
      EXPECT_EQ(block.begin, end);
      EXPECT_EQ(block.begin % ParameterLayout::kAlignment, 0);
      end += block.elements;
    }
    EXPECT_EQ(end, golden.layout.elements);
  }
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const std::string& name : GoldenNames()) {
    for (const auto recompute : {Recompute::kNone, Recompute::kAttentionOnly, Recompute::kFull}) {
      cases.push_back({name, recompute});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, DecoderTest, testing::ValuesIn(Cases()), [](const auto& info) {
  std::string name = info.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name + std::to_string(static_cast<int>(info.param.recompute));
});

}  // namespace
}  // namespace ringleader::model
