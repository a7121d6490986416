// A whole model under each attention.mask: what attention by the mask's definition in fp64 gives,
// on one rank and on many, with losses that know of no token that the mask hides.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "worker/attention/testing/ring_settings.h"
#include "worker/model/testing/dense_context_attention.h"
#include "worker/trainer/testing/model_on_ranks.h"

namespace ringleader::trainer {
namespace {

using attention::testing::AllRingSettings;
using attention::testing::RingSetting;
using patterns::AttentionOptions;
using patterns::Mask;
using patterns::Pattern;
using testing::ExpectNear;
using testing::ModelResult;
using testing::PackedSequence;
using testing::RunOnRanks;
using testing::Sequence;
using torch::Tensor;

constexpr int64_t kWindow = 70, kBlock = 96;  // tokens; neither is whole tiles

// Documents, one of a token, one that is all prefix, some without, and a tail that is no whole tile
// where there is one rank.
Sequence Documents(int64_t tokens) {
  Sequence sequence = PackedSequence(tokens, {0, 1, 64, 200, 201, 230, 500});
  sequence.prefix_ends = {1, 1, 130, 201, 201, 400, 500 + (tokens - 500) / 2};
  return sequence;
}

// Whether query i sees key j: the table of docs/job_file.md once more, pair by pair.
bool Sees(const AttentionOptions& options, const Sequence& sequence, int64_t i, int64_t j) {
  const auto document_of = [&](int64_t position) {
    return std::ranges::count_if(sequence.document_firsts,
                                 [&](int64_t first) { return first <= position; });
  };
  if (document_of(i) != document_of(j)) return false;
  if (options.pattern == Pattern::kSlidingWindow && std::abs(i - j) >= options.window) return false;
  const int64_t first = sequence.document_firsts[document_of(i) - 1];
  switch (options.mask) {
    case Mask::kCausal:
      return j <= i;
    case Mask::kFull:
      return true;
    case Mask::kPrefixLm:
      return j <= i || j < sequence.prefix_ends[document_of(i) - 1];
    case Mask::kBlockCausal:
      return (j - first) / options.mask_block <= (i - first) / options.mask_block;
  }
  return false;
}

ModelResult Expected(const AttentionOptions& options, const Sequence& sequence) {
  Tensor visible = torch::zeros({sequence.length(), sequence.length()}, torch::kBool);
  auto sees = visible.accessor<bool, 2>();
  for (int64_t i = 0; i < sequence.length(); ++i) {
    for (int64_t j = 0; j < sequence.length(); ++j) sees[i][j] = Sees(options, sequence, i, j);
  }
  model::DenseContextAttention reference(visible, torch::kDouble);
  return RunWith(sequence, reference);
}

std::vector<AttentionOptions> AllMasks() {
  std::vector<AttentionOptions> all;
  for (const Mask mask : {Mask::kCausal, Mask::kFull, Mask::kPrefixLm, Mask::kBlockCausal}) {
    for (const Pattern pattern : {Pattern::kDense, Pattern::kSlidingWindow}) {
      all.push_back({.pattern = pattern,
                     .mask = mask,
                     .mask_block = kBlock,
                     .window = pattern == Pattern::kSlidingWindow ? kWindow : 0,
                     .tile = 64});
    }
  }
  return all;
}

std::string NameOf(const AttentionOptions& options) {
  return std::string(MaskName(options.mask)) +
         (options.pattern == Pattern::kDense ? " dense" : " in a window");
}

class MasksTest : public ::testing::TestWithParam<RingSetting> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_P(MasksTest, EqualTheDefinitionOnAnyNumberOfRanks) {
  const Sequence sequence = Documents(1024);
  static const std::vector<ModelResult>& all_expected = *[&] {
    auto* all = new std::vector<ModelResult>;
    for (const AttentionOptions& options : AllMasks()) all->push_back(Expected(options, sequence));
    return all;
  }();
  for (size_t i = 0; i < AllMasks().size(); ++i) {
    AttentionOptions options = AllMasks()[i];
    SCOPED_TRACE(NameOf(options));
    const ModelResult& expected = all_expected[i];
    options.layout = GetParam().layout;
    options.ring = GetParam().ring;
    const ModelResult actual = RunOnRanks(sequence, options, options.ring.ranks());
    ExpectNear(actual, expected);
    EXPECT_LE((actual.losses - expected.losses).abs().max().item<double>(), 1e-4);
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, MasksTest, ::testing::ValuesIn(AllRingSettings()),
                         [](const auto& info) { return attention::testing::NameOf(info.param); });

// On one rank a sequence may end within a tile, and a sequence may be one document.
TEST(MaskedTailsTest, EqualTheDefinition) {
  at::set_num_threads(1);
  for (const AttentionOptions& options : AllMasks()) {
    SCOPED_TRACE(NameOf(options));
    const Sequence ragged = Documents(777);
    ExpectNear(RunOnRanks(ragged, options, 1), Expected(options, ragged));
    Sequence whole = PackedSequence(333, {0});
    whole.prefix_ends = {100};
    ExpectNear(RunOnRanks(whole, options, 1), Expected(options, whole));
  }
}

// The losses of which tokens change, to the last bit, with the token at 340: those of the queries
// of its document that the mask shows it to, in the second layer through others, and no other.
TEST(MaskedLeaksTest, ATokenChangesWhatSeesIt) {
  at::set_num_threads(1);
  constexpr int64_t kChanged = 340, kFirst = 230, kEnd = 500, kPrefixEnd = 400;
  for (AttentionOptions options : AllMasks()) {
    if (options.pattern != Pattern::kDense) continue;
    SCOPED_TRACE(NameOf(options));
    Sequence sequence = Documents(1024);
    options.ring.inner = 2;
    const Tensor before = RunOnRanks(sequence, options, 2).losses;
    sequence.tokens[kChanged] = (sequence.tokens[kChanged] + 1).remainder(61);
    const Tensor same = (RunOnRanks(sequence, options, 2).losses - before).eq(0);
    const auto unchanged = [&](int64_t begin, int64_t end) {
      return same.slice(0, begin, end).all().item<bool>();
    };
    EXPECT_TRUE(unchanged(0, kFirst) && unchanged(kEnd, 1024)) << "another document";
    EXPECT_FALSE(unchanged(kChanged, kChanged + 1));
    const int64_t block_begin = kFirst + (kChanged - kFirst) / kBlock * kBlock;
    switch (options.mask) {
      case Mask::kCausal:
        EXPECT_TRUE(unchanged(kFirst, kChanged));
        break;
      case Mask::kFull:
        EXPECT_FALSE(unchanged(kFirst, kFirst + 1));
        break;
      case Mask::kPrefixLm:
        EXPECT_FALSE(unchanged(kFirst, kFirst + 1)) << "a prefix sees its later tokens";
        EXPECT_LT(kChanged, kPrefixEnd);
        break;
      case Mask::kBlockCausal:
        EXPECT_TRUE(unchanged(kFirst, block_begin));
        EXPECT_FALSE(unchanged(block_begin, block_begin + 1));
        break;
    }
  }
}

// What comes after the prefix is hidden from it, and from all before it.
TEST(MaskedLeaksTest, APrefixSeesNothingBehindIt) {
  at::set_num_threads(1);
  const AttentionOptions options{.mask = Mask::kPrefixLm, .tile = 64};
  Sequence sequence = Documents(1024);
  const Tensor before = RunOnRanks(sequence, options, 1).losses;
  sequence.tokens[410] = (sequence.tokens[410] + 1).remainder(61);
  const Tensor same = (RunOnRanks(sequence, options, 1).losses - before).eq(0);
  EXPECT_TRUE(same.slice(0, 0, 410).all().item<bool>());
  EXPECT_FALSE(same[410].item<bool>());
}

}  // namespace
}  // namespace ringleader::trainer
