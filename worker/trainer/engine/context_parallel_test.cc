// A whole model on 1, 2 and 4 ranks, under every layout and ring: the same loss, and the same
// gradient of every parameter, for dense attention, for the same sparse index, and for packed
// documents.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/attention/testing/ring_settings.h"
#include "worker/comm/testing/local_communicator.h"
#include "worker/model/decoder/decoder.h"
#include "worker/model/testing/flat_store.h"
#include "worker/model/testing/golden.h"
#include "worker/model/token_ops/cpu_token_ops.h"
#include "worker/trainer/testing/model_on_ranks.h"

namespace ringleader::trainer {
namespace {

using attention::testing::AllRingSettings;
using attention::testing::RingSetting;
using patterns::AttentionOptions;
using patterns::Pattern;
using testing::ExpectNear;
using testing::ModelResult;
using testing::PackedSequence;
using testing::RunOnRanks;
using testing::Sequence;
using testing::WholeSequence;
using torch::Tensor;

constexpr int64_t kTokens = 1024;

const std::vector<int64_t> kDocuments = {0, 1, 64, 200, 201, 230, 900};

class ContextParallelTest : public ::testing::TestWithParam<RingSetting> {
 protected:
  void SetUp() override { at::set_num_threads(1); }

  void ExpectSameAsOneRank(AttentionOptions options,
                           const Sequence& sequence = WholeSequence(kTokens)) {
    options.tile = 64;
    const ModelResult expected = RunOnRanks(sequence, options, 1);
    options.layout = GetParam().layout;
    options.ring = GetParam().ring;
    ExpectNear(RunOnRanks(sequence, options, options.ring.inner * options.ring.outer), expected);
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

TEST_P(ContextParallelTest, Moba) {
  ExpectSameAsOneRank({.pattern = Pattern::kMoba, .block_size = 128, .topk_blocks = 2});
}

TEST_P(ContextParallelTest, XAttention) {
  ExpectSameAsOneRank({.pattern = Pattern::kXAttention, .threshold = 0.5});
}

TEST_P(ContextParallelTest, KeyGroups) {
  ExpectSameAsOneRank({.pattern = Pattern::kKeyGroups, .density = 0.3});
}

TEST_P(ContextParallelTest, Documents) {
  ExpectSameAsOneRank({}, PackedSequence(kTokens, kDocuments));
}

TEST_P(ContextParallelTest, DocumentsUnderVerticalSlash) {
  ExpectSameAsOneRank({.pattern = Pattern::kVerticalSlash,
                       .budget = {.max_verticals = 100, .max_slashes = 4},
                       .dense_layers = {0}},
                      PackedSequence(kTokens, kDocuments));
}

// The rotation of a rank's tokens is that of the whole sequence: dynamic scaling grows with its
// length, of which each rank has a part.
TEST_P(ContextParallelTest, RotaryScalingOfTheWholeSequence) {
  for (const char* model : {"qwen2-dynamic", "qwen2-yarn"}) {
    Sequence sequence = WholeSequence(kTokens);
    sequence.model = model;
    ExpectSameAsOneRank({}, sequence);
  }
}

// Every document as a sequence of its own, its positions counted from 0. Rotary embeddings make
// scores depend on distances alone, so that the packed sequence gives the sum of the documents'
// losses and gradients, but for the rounding of other angles.
TEST(PackedDocumentsTest, TrainAsTheDocumentsAlone) {
  at::set_num_threads(1);
  const AttentionOptions options{.tile = 64};
  const Sequence packed = PackedSequence(kTokens, kDocuments);
  ModelResult sum;
  for (size_t i = 0; i < kDocuments.size(); ++i) {
    const int64_t end = i + 1 < kDocuments.size() ? kDocuments[i + 1] : kTokens;
    const ModelResult alone = RunOnRanks(
        {packed.tokens.slice(0, kDocuments[i], end), packed.labels.slice(0, kDocuments[i], end)},
        options, 1);
    sum.loss += alone.loss;
    for (const auto& [name, gradient] : alone.gradients) {
      Tensor& whole = sum.gradients.try_emplace(name, torch::zeros_like(gradient)).first->second;
      whole += gradient;
    }
  }
  ExpectNear(RunOnRanks(packed, options, 1), sum);
}

INSTANTIATE_TEST_SUITE_P(Settings, ContextParallelTest, ::testing::ValuesIn(AllRingSettings()),
                         [](const auto& info) { return NameOf(info.param); });

// Returns the largest difference that two endings of 16 tokens make to the losses of all tokens but
// the last 17; those tokens and their labels stay as they are.
double LargestLeak(AttentionOptions options) {
  options.tile = 64;
  const model::Golden golden = model::LoadGolden("qwen2");
  Sequence sequence = WholeSequence(kTokens);
  std::vector<Tensor> losses;
  comm::testing::RunRanks(1, [&](comm::Communicator& communicator) {
    const auto ops = model::NewCpuTokenOps(/*threads=*/1);
    model::FlatStore store(golden.layout, golden.values, torch::kCPU, torch::kFloat);
    model::Decoder decoder(golden.config, *ops, store,
                           {.recompute = {.recompute = model::Recompute::kNone}});
    auto attention = attention::CreateCpuRingAttention(options, &communicator);
    TORCH_CHECK(attention.ok(), std::string(attention.status().message()));
    for (int ending = 0; ending < 2; ++ending) {
      const model::TokenScores scores = decoder.Score({.tokens = sequence.tokens,
                                                       .positions = torch::arange(kTokens),
                                                       .labels = sequence.labels,
                                                       .sequence_length = kTokens},
                                                      **attention);
      losses.push_back(scores.losses.narrow(0, 0, kTokens - 17).clone());
      sequence.tokens.narrow(0, kTokens - 16, 16).fill_(1);
    }
  });
  return (losses[0] - losses[1]).abs().max().item<double>();
}

// A loss that changes with tokens after the one that it predicts knows of them.
TEST(CausalChoiceTest, DecidesWhetherLossesKnowOfLaterTokens) {
  at::set_num_threads(1);
  AttentionOptions options{.pattern = Pattern::kBlockTopK, .block_size = 64, .topk_blocks = 2};
  const double blocks = LargestLeak(options);
  options.selection = patterns::Selection::kCausal;
  EXPECT_EQ(LargestLeak(options), 0.0);
  const double slash = LargestLeak({.pattern = Pattern::kVerticalSlash,
                                    .select = patterns::Select::kTopK,
                                    .budget = {.max_verticals = 32, .max_slashes = 3}});
  EXPECT_GT(blocks, 0.0);
  EXPECT_GT(slash, 0.0);
  EXPECT_EQ(LargestLeak({.pattern = Pattern::kSlidingWindow, .window = 200}), 0.0);
  RecordProperty("largest_difference_block_topk", absl::StrCat(blocks));
  RecordProperty("largest_difference_vertical_slash", absl::StrCat(slash));
}

}  // namespace
}  // namespace ringleader::trainer
