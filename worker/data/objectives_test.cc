// What a job predicts: prefixes that are given, and tokens that are hidden.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "base/files.h"
#include "worker/data/testing/packed_text.h"

namespace ringleader::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class PrefixTest : public testing::PackedTextTest {
 protected:
  // Tokens 0 to 6: "ab;cdef"; 8 to 11: ";gh;" and so on, each ended by a separator.
  PrefixTest() {
    AddText("a", "ab;cdef");
    AddText("b", ";gh;");
    AddText("c", "ijkl;");
    PackOptions options = Options();
    options.prefix_end = ';';
    EXPECT_TRUE(Pack(options).ok());
  }
  absl::StatusOr<Loader> Open(uint64_t length, bool samples) const {
    return Loader::Open(Train(), length, /*seed=*/1, kByteVocabulary,
                        {.samples = samples, .overlong = Overlong::kSplit, .prefixes = true});
  }
};

// The first token behind a prefix is predicted by the prefix's last.
TEST_F(PrefixTest, PrefixesAreGivenAndTheRestIsPredicted) {
  const auto folder = TokenFolder::Open(Train());
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_TRUE(folder->manifest().prefixes);
  EXPECT_TRUE(folder->manifest().tasks.empty());
  const auto loader = Open(12, /*samples=*/false);
  ASSERT_TRUE(loader.ok()) << loader.status();
  const LocalSequence sequence = testing::ReadOne(*loader, loader->InOrder(0), {.tokens = 12});
  constexpr int64_t kNone = kIgnoreLabel, kEnd = kByteSeparator;
  EXPECT_THAT(sequence.document_firsts, ElementsAre(0, 8));
  EXPECT_THAT(sequence.prefix_ends, ElementsAre(3, 9));
  EXPECT_THAT(sequence.labels,
              ElementsAre(kNone, kNone, 'c', 'd', 'e', 'f', kEnd, kNone, 'g', 'h', ';', kEnd));
}

// Whatever a sequence cuts off.
TEST_F(PrefixTest, APrefixIsWhatOfItASequenceHolds) {
  const auto loader = Open(2, /*samples=*/false);
  ASSERT_TRUE(loader.ok()) << loader.status();
  std::vector<std::vector<int64_t>> ends;
  for (uint64_t i = 0; i < 9; ++i) {
    ends.push_back(testing::ReadOne(*loader, loader->InOrder(i), {.tokens = 2}).prefix_ends);
  }
  EXPECT_THAT(ends, ElementsAre(ElementsAre(2), ElementsAre(1), ElementsAre(0), ElementsAre(0),
                                ElementsAre(1), ElementsAre(0),
                                // the separator, then "i"
                                ElementsAre(0, 2), ElementsAre(2), ElementsAre(2)));
}

TEST_F(PrefixTest, SamplesAndPaddingHaveTheirOwn) {
  const auto loader = Open(8, /*samples=*/true);
  ASSERT_TRUE(loader.ok()) << loader.status();
  const std::vector<Sample> both = {loader->InOrder(0), loader->InOrder(2)};
  const LocalSequence sequence = loader->Read(both, {.tokens = 16});
  EXPECT_THAT(sequence.document_firsts, ElementsAre(0, 7, 12));
  EXPECT_THAT(sequence.prefix_ends, ElementsAre(3, 12, 12));
  const auto split = Open(4, /*samples=*/true);
  EXPECT_THAT(testing::ReadOne(*split, split->InOrder(1), {.tokens = 3}).prefix_ends,
              ElementsAre(0))
      << "the second piece of a document";
}

// A prefix is what the rest is predicted from.
TEST_F(PrefixTest, WhatIsGivenIsNeverHidden) {
  const auto loader = Loader::Open(Train(), 12, /*seed=*/1, 300,
                                   {.prefixes = true, .hidden_share = 1, .hidden_token = 299});
  ASSERT_TRUE(loader.ok()) << loader.status();
  const LocalSequence sequence = testing::ReadOne(*loader, loader->InOrder(0), {.tokens = 12});
  constexpr int64_t kNone = kIgnoreLabel, kEnd = kByteSeparator;
  EXPECT_THAT(sequence.tokens,
              ElementsAre('a', 'b', ';', 299, 299, 299, 299, 299, ';', 299, 299, 299));
  EXPECT_THAT(sequence.labels,
              ElementsAre(kNone, kNone, kNone, 'c', 'd', 'e', 'f', kEnd, kNone, 'g', 'h', ';'));
}

TEST_F(PrefixTest, PackingRefusesWhatHasNoEnd) {
  AddText("more/d", "mno");
  PackOptions options = Options();
  options.output += "-2";
  options.prefix_end = ';';
  EXPECT_THAT(Complaint(options), HasSubstr("d: no token 59 (--prefix-end) in the document that "
                                            "ends at its token 3"));
  options.prefix_end = kByteSeparator;
  EXPECT_THAT(Complaint(options), HasSubstr("--prefix-end 256"));
  options.prefix_end = 300;
  EXPECT_THAT(Complaint(options), HasSubstr("--prefix-end 300"));
}

TEST_F(PrefixTest, SeparatorsWithinAFileBeginPrefixesToo) {
  AddText("ids/e", std::string("\1\0\2\0\3\0\0\0\4\0\2\0\5\0", 14));  // 1 2 3 | 4 2 5
  PackOptions options = Options();
  options.paths = {(folder_ / "text/ids").string()};
  options.output += "-ids";
  options.input = PackOptions::Input::kUint16;
  options.vocabulary = 10;
  options.separator = 0;
  options.prefix_end = 2;
  ASSERT_TRUE(Pack(options).ok());
  const auto folder = TokenFolder::Open(options.output + "/train");
  std::vector<int> marks;
  for (uint64_t i = 0; i < folder->tokens(); ++i) marks.push_back(folder->mark(i));
  EXPECT_THAT(marks, ElementsAre(255, 255, 0, 0, 255, 255, 0, 0));
  options.output += "-3";
  options.prefix_end = 5;
  EXPECT_THAT(Complaint(options), HasSubstr("in the document that ends at its token 3"));
  options.tasks = {"t"};
  EXPECT_THAT(Complaint(options), HasSubstr("--prefix-end beside --tasks"));
}

TEST_F(PrefixTest, DataWithoutPrefixesIsRefusedByName) {
  PackOptions options = Options();
  options.output += "-plain";
  ASSERT_TRUE(Pack(options).ok());
  const absl::Status refused =
      Loader::Open(options.output + "/train", 4, 1, 257, {.prefixes = true}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("says of no document where its prefix ends"));
  // The marks and what the manifest says of them belong together.
  const std::string path = Train() + "/manifest.json";
  std::string text = ReadFile(path).value();
  const std::string said = ",\n  \"prefixes\": true";
  ASSERT_NE(text.find(said), std::string::npos) << text;
  text.erase(text.find(said), said.size());
  ASSERT_TRUE(WriteFileAtomically(path, text).ok());
  EXPECT_EQ(TokenFolder::Open(Train()).status().code(), absl::StatusCode::kDataLoss);
}

// Marks of tasks give prefixes, too; what is given later in a document is none of it.
TEST_F(PrefixTest, TokensThatAreGivenLaterAreNoPrefix) {
  AddText("ids/f", std::string("\1\0\2\0\3\0\4\0\5\0", 10));
  AddText("ids/f.marks", "\xff\xff\x01\xff\x01");
  PackOptions options = Options();
  options.paths = {(folder_ / "text/ids").string()};
  options.output += "-marked";
  options.input = PackOptions::Input::kUint16;
  options.vocabulary = 10;
  options.separator = 0;
  options.tasks = {"t"};
  ASSERT_TRUE(Pack(options).ok());
  const auto folder = TokenFolder::Open(options.output + "/train");
  ASSERT_TRUE(folder.ok()) << folder.status();
  std::vector<uint64_t> ends;
  for (uint64_t begin = 0; begin < 6; ++begin) ends.push_back(folder->PrefixEnd(begin, 6));
  EXPECT_THAT(ends, ElementsAre(2, 2, 2, 3, 4, 5));
}

TEST(PrefixFormatTest, TheGoldenShardIsRead) {
  const auto folder = TokenFolder::Open("tests/golden/prefix-tokens");
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(testing::TextOf(*folder), "Question?\nAnswer.|");
  EXPECT_EQ(folder->PrefixEnd(0, folder->tokens()), 10u);
}

class HiddenTest : public testing::PackedTextTest {
 protected:
  HiddenTest() {
    AddText("a", std::string(4000, 'a'));
    AddText("b", std::string(4000, 'b'));
    EXPECT_TRUE(Pack(Options()).ok());
  }
  Loader Open(double share, uint64_t seed = 1) const {
    return *Loader::Open(Train(), 4000, seed, 300, {.hidden_share = share, .hidden_token = 299});
  }
  // Places of the first sequence of a sample.
  static std::set<int64_t> Hidden(const LocalSequence& sequence) {
    std::set<int64_t> hidden;
    for (size_t i = 0; i < sequence.tokens.size(); ++i) {
      if (sequence.tokens[i] == 299) hidden.insert(sequence.positions[i]);
    }
    return hidden;
  }
};

TEST_F(HiddenTest, AShareIsHiddenAndPredictedWhereItLies) {
  const Loader plain = *Loader::Open(Train(), 4000, 1, 300), loader = Open(0.25);
  const LocalSequence all = testing::ReadOne(plain, plain.InOrder(0), {.tokens = 4000});
  const LocalSequence sequence = testing::ReadOne(loader, loader.InOrder(0), {.tokens = 4000});
  for (size_t i = 0; i < sequence.tokens.size(); ++i) {
    const bool is_hidden = sequence.tokens[i] == 299;
    EXPECT_EQ(sequence.labels[i], is_hidden ? all.tokens[i] : kIgnoreLabel);
    if (!is_hidden) {
      EXPECT_EQ(sequence.tokens[i], all.tokens[i]);
    }
  }
  EXPECT_NEAR(static_cast<double>(Hidden(sequence).size()), 1000, 120);
}

TEST_F(HiddenTest, WhichDependsOnEpochAndSeedAndNotOnRanks) {
  const Loader loader = Open(0.25);
  const auto read = [](const Loader& from, const Sample& sample) {
    return Hidden(testing::ReadOne(from, sample, {.tokens = 4000}));
  };
  const Sample evaluated = loader.InOrder(0);
  EXPECT_EQ(read(loader, evaluated), read(Open(0.25), evaluated));
  EXPECT_NE(read(loader, evaluated), read(Open(0.25, /*seed=*/2), evaluated));
  const auto in_epoch = [&](uint64_t epoch) {
    for (uint64_t i = 0; i < loader.sequences(); ++i) {
      const Sample sample = loader.Shuffled(epoch * loader.sequences() + i);
      EXPECT_EQ(sample.epoch, epoch + 1);
      if (sample.start == 0) return read(loader, sample);
    }
    return std::set<int64_t>();
  };
  EXPECT_FALSE(in_epoch(0).empty());
  EXPECT_NE(in_epoch(0), in_epoch(1));
  EXPECT_NE(in_epoch(0), read(loader, evaluated));
  std::set<int64_t> parts;
  for (int rank = 0; rank < 2; ++rank) {
    parts.merge(Hidden(testing::ReadOne(loader, evaluated,
                                        {.kind = kernels::LayoutKind::kStriped,
                                         .ranks = 2,
                                         .rank = rank,
                                         .stripe = 10,
                                         .tokens = 4000})));
  }
  EXPECT_EQ(parts, read(loader, evaluated));
}

TEST_F(HiddenTest, TheHiddenTokenIsOneOfTheModels) {
  const absl::Status refused =
      Loader::Open(Train(), 400, 1, 299, {.hidden_share = 0.5, .hidden_token = 299}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("data.hidden_token: 299 is outside of the model's vocabulary of 299"));
}

TEST_F(HiddenTest, TheHiddenTokenIsNoneOfTheData) {
  const auto refused = [&](uint32_t token) {
    const absl::Status status =
        Loader::Open(Train(), 400, 1, 300, {.hidden_share = 0.5, .hidden_token = token}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << token;
    return std::string(status.message());
  };
  EXPECT_THAT(refused('b'), HasSubstr("data.hidden_token: 98 is token "));
  EXPECT_THAT(refused(kByteSeparator), HasSubstr("ends documents in"));
  EXPECT_TRUE(Loader::Open(Train(), 400, 1, 300, {.hidden_token = 'b'}).ok());
}

}  // namespace
}  // namespace ringleader::data
