// Documents as samples: which there are, what becomes of long ones, and how a micro-batch of
// several is read.
#include "worker/data/samples.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/process/progress.h"
#include "worker/data/loader.h"
#include "worker/data/testing/packed_text.h"

namespace ringleader::data {
namespace {

using kernels::LayoutKind;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SamplesTest : public testing::PackedTextTest {
 protected:
  SamplesTest() {
    AddText("a", "abcde");
    AddText("b", "x");
    AddText("c", "0123456789");
    EXPECT_TRUE(Pack(Options()).ok());
  }
  absl::StatusOr<Loader> Open(uint64_t length, Overlong overlong) const {
    return Loader::Open(Train(), length, /*seed=*/1, kByteVocabulary,
                        {.samples = true, .overlong = overlong});
  }
  static std::vector<uint64_t> LengthsOf(const Loader& loader) {
    std::vector<uint64_t> lengths;
    for (uint64_t i = 0; i < loader.sequences(); ++i) lengths.push_back(loader.InOrder(i).tokens);
    return lengths;
  }
};

// Separators end documents; they are the last label, and no token of a sample.
TEST_F(SamplesTest, AreDocumentsWhole) {
  const auto loader = Open(10, Overlong::kRefuse);
  ASSERT_TRUE(loader.ok()) << loader.status();
  EXPECT_THAT(LengthsOf(*loader), ElementsAre(5, 1, 10));
  const std::vector<Sample> one = {loader->InOrder(0)};
  const LocalSequence sequence = loader->Read(one, {.tokens = 5});
  EXPECT_THAT(sequence.tokens, ElementsAre('a', 'b', 'c', 'd', 'e'));
  EXPECT_THAT(sequence.labels, ElementsAre('b', 'c', 'd', 'e', kByteSeparator));
  EXPECT_THAT(sequence.document_firsts, ElementsAre(0));
  EXPECT_EQ(sequence.content, 5);
  EXPECT_EQ(sequence.rotary_length, 10);
  EXPECT_EQ(loader->counts().documents, 3u);
  EXPECT_EQ(loader->counts().overlong, 0u);
}

// A look through all tokens may take longer than a hang is waited for.
TEST_F(SamplesTest, OpeningMuchDataTellsThatItGoesOn) {
  constexpr int kFiles = 9, kBytes = 1 << 20;
  for (int i = 0; i < kFiles; ++i) AddText(absl::StrCat("large-", i), std::string(kBytes, 'x'));
  PackOptions options = Options();
  options.output += "-large";
  options.shard_tokens = 2 * kBytes;
  ASSERT_TRUE(Pack(options).ok());
  const uint64_t before = Progress::count();
  const auto folder = TokenFolder::Open(options.output + "/train");
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_GE(Progress::count() - before, uint64_t{kFiles / 2}) << "for each shard";
  const uint64_t opened = Progress::count();
  EXPECT_TRUE(IndexSamples(*folder, "data.train", 2 * kBytes, Overlong::kRefuse).ok());
  EXPECT_EQ(Progress::count() - opened, 2u) << "for every four million tokens";
}

TEST_F(SamplesTest, TooLongAreRefusedSplitOrDroppedAndCounted) {
  EXPECT_THAT(std::string(Open(4, Overlong::kRefuse).status().message()),
              HasSubstr("2 of 3 documents have more than data.sequence_length = 4 tokens, the "
                        "longest 10; raise that, or set data.overlong"));
  const auto split = Open(4, Overlong::kSplit);
  ASSERT_TRUE(split.ok()) << split.status();
  EXPECT_THAT(LengthsOf(*split), ElementsAre(4, 1, 1, 4, 4, 2));
  const std::vector<Sample> part = {split->InOrder(0)};
  // The part's last label is the next part's first token: nothing is lost.
  EXPECT_THAT(split->Read(part, {.tokens = 4}).labels, ElementsAre('b', 'c', 'd', 'e'));
  const auto drop = Open(4, Overlong::kDrop);
  ASSERT_TRUE(drop.ok()) << drop.status();
  EXPECT_THAT(LengthsOf(*drop), ElementsAre(1));
  for (const auto* loader : {&*split, &*drop}) {
    EXPECT_EQ(loader->counts().documents, 3u);
    EXPECT_EQ(loader->counts().overlong, 2u);
    EXPECT_EQ(loader->counts().overlong_tokens, 15u);
  }
}

TEST_F(SamplesTest, OfWhichNoneIsLeftAreAnError) {
  AddText("d/text/long", std::string(8, 'l'));
  PackOptions options = Options();
  options.paths = {(folder_ / "text/d").string()};
  options.output = (folder_ / "long").string();
  ASSERT_TRUE(Pack(options).ok());
  const auto loader = Loader::Open(options.output + "/train", 4, 1, kByteVocabulary,
                                   {.samples = true, .overlong = Overlong::kDrop});
  EXPECT_THAT(std::string(loader.status().message()), HasSubstr("none of 1 documents is a sample"));
}

TEST_F(SamplesTest, OfOneMicroBatchHaveTheirOwnPositionsAndPaddingHasNoLabels) {
  const auto loader = Open(10, Overlong::kRefuse);
  const std::vector<Sample> samples = {loader->InOrder(0), loader->InOrder(1)};
  const LocalSequence whole = loader->Read(samples, {.tokens = 8});
  EXPECT_THAT(whole.positions, ElementsAre(0, 1, 2, 3, 4, 0, 0, 1));
  EXPECT_THAT(whole.labels, ElementsAre('b', 'c', 'd', 'e', kByteSeparator, kByteSeparator,
                                        kIgnoreLabel, kIgnoreLabel));
  EXPECT_THAT(whole.document_firsts, ElementsAre(0, 5, 6));
  EXPECT_EQ(whole.content, 6);
  EXPECT_EQ(whole.sequence_length, 8);
  // Ranks together hold the same.
  for (const LayoutKind kind : {LayoutKind::kContiguous, LayoutKind::kZigzag}) {
    for (int rank = 0; rank < 2; ++rank) {
      const kernels::ShardLayout layout = {.kind = kind, .ranks = 2, .rank = rank, .tokens = 8};
      const LocalSequence mine = loader->Read(samples, layout);
      for (int64_t i = 0; i < layout.local_tokens(); ++i) {
        EXPECT_EQ(mine.tokens[i], whole.tokens[layout.Position(i)]);
        EXPECT_EQ(mine.labels[i], whole.labels[layout.Position(i)]);
        EXPECT_EQ(mine.positions[i], whole.positions[layout.Position(i)]);
      }
    }
  }
}

TEST_F(SamplesTest, AnEpochHasEachOnce) {
  const auto loader = Open(4, Overlong::kSplit);
  std::vector<uint64_t> starts;
  for (uint64_t i = 0; i < 6; ++i) starts.push_back(loader->Shuffled(6 + i).start);
  std::sort(starts.begin(), starts.end());
  EXPECT_THAT(starts, ElementsAre(0, 4, 6, 8, 12, 16));
}

}  // namespace
}  // namespace ringleader::data
