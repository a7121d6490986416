// A whole model on 1, 2 and 4 ranks, under every layout and ring: the same loss, and the same
// gradient of every parameter, for dense attention and for the same sparse index.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "worker/attention/ring_attention.h"
#include "worker/attention/testing/ring_settings.h"
#include "worker/comm/testing/local_communicator.h"
#include "worker/model/decoder.h"
#include "worker/model/testing/golden.h"

namespace ringleader::trainer {
namespace {

using attention::AttentionOptions;
using attention::Pattern;
using attention::testing::AllRingSettings;
using attention::testing::RingSetting;
using torch::Tensor;

constexpr int64_t kTokens = 1024;

struct Result {
  double loss = 0;                          // summed over the sequence
  std::map<std::string, Tensor> gradients;  // of that sum, by parameter
};

// One sequence through two layers, forward and backward, a thread a rank.
Result RunOnRanks(const AttentionOptions& options, int ranks) {
  const model::Golden golden = model::LoadGolden("qwen2");
  torch::manual_seed(5);
  const Tensor tokens = torch::randint(golden.config.vocab_size, {kTokens}, torch::kLong);
  Tensor labels = tokens.roll(-1);
  labels[kTokens - 1] = model::kIgnoreLabel;

  std::vector<Result> parts(ranks);
  comm::testing::RunRanks(ranks, [&](comm::Communicator& communicator) {
    const kernels::ShardLayout layout{.kind = options.layout,
                                      .ranks = ranks,
                                      .rank = communicator.rank(),
                                      .stripe = options.tile,
                                      .tokens = kTokens};
    Tensor positions = torch::empty({layout.local_tokens()}, torch::kLong);
    for (int64_t i = 0; i < layout.local_tokens(); ++i) {
      positions.data_ptr<int64_t>()[i] = layout.Position(i);
    }
    model::Decoder decoder(golden.config, 1, model::Recompute::kNone);
    std::copy_n(golden.values.data_ptr<float>(), golden.layout.elements, decoder.parameters());
    auto attention = attention::RingAttention::Create(options, &communicator);
    TORCH_CHECK(attention.ok(), std::string(attention.status().message()));
    const Tensor hidden =
        decoder.Forward(tokens.index_select(0, positions), positions, kTokens, **attention);
    const Tensor sum = decoder.Loss(hidden, labels.index_select(0, positions)).sum;
    sum.backward();
    Result& part = parts[communicator.rank()];
    part.loss = sum.item<double>();
    for (const model::ParameterSlot& slot : decoder.layout().slots) {
      part.gradients[slot.name] =
          torch::from_blob(decoder.gradients() + slot.offset, slot.shape).clone();
    }
  });
  Result result = parts[0];
  for (int rank = 1; rank < ranks; ++rank) {
    result.loss += parts[rank].loss;
    for (auto& [name, gradient] : result.gradients) gradient += parts[rank].gradients.at(name);
  }
  return result;
}

class ContextParallelTest : public ::testing::TestWithParam<RingSetting> {
 protected:
  void SetUp() override { at::set_num_threads(1); }

  void ExpectSameAsOneRank(AttentionOptions options) {
    options.tile = 64;
    const Result expected = RunOnRanks(options, 1);
    options.layout = GetParam().layout;
    options.ring = GetParam().ring;
    const Result actual = RunOnRanks(options, options.ring.inner * options.ring.outer);
    EXPECT_NEAR(actual.loss, expected.loss, 1e-5 * expected.loss);
    for (const auto& [name, gradient] : expected.gradients) {
      // Softmax hardly feels a bias of all keys: what is left of its gradient is a cancellation,
      // and is measured by the gradient of the matrix beside it.
      std::string scale = name;
      if (name.ends_with("k_proj.bias")) scale.replace(name.size() - 4, 4, "weight");
      EXPECT_LE((actual.gradients.at(name) - gradient).norm().item<double>(),
                1e-5 * expected.gradients.at(scale).norm().item<double>())
          << name;
    }
  }
};

TEST_P(ContextParallelTest, Dense) {
  ExpectSameAsOneRank({});
}

TEST_P(ContextParallelTest, SlidingWindow) {
  ExpectSameAsOneRank({.pattern = Pattern::kSlidingWindow, .window = 200});
}

TEST_P(ContextParallelTest, VerticalSlash) {
  ExpectSameAsOneRank({.pattern = Pattern::kVerticalSlash,
                       .budget = {.max_verticals = 100, .max_slashes = 4},
                       .dense_layers = {0}});
}

TEST_P(ContextParallelTest, BlockTopK) {
  ExpectSameAsOneRank({.pattern = Pattern::kBlockTopK, .block_size = 128, .topk_blocks = 2});
}

INSTANTIATE_TEST_SUITE_P(Settings, ContextParallelTest, ::testing::ValuesIn(AllRingSettings()),
                         [](const auto& info) { return NameOf(info.param); });

}  // namespace
}  // namespace ringleader::trainer
