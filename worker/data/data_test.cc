#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "worker/data/loader.h"
#include "worker/data/testing/packed_text.h"

namespace ringleader::data {
namespace {

namespace fs = std::filesystem;
using kernels::LayoutKind;
using kernels::ShardLayout;
using ::testing::HasSubstr;

using DataTest = testing::PackedTextTest;
using testing::TextOf;

TEST_F(DataTest, PacksFilesInOrderOfTheirPaths) {
  AddText("b.h", "second");
  AddText("a/z.h", "first");
  AddText("c.o", "not wanted");
  AddText("d.h", std::string("no\0text", 7));
  PackOptions options = Options();
  options.suffixes = {".h"};
  const auto result = Pack(options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->train.documents, 2u);
  EXPECT_EQ(result->skipped_files, 1u);
  const auto folder = TokenFolder::Open(Train());
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(TextOf(*folder), "first|second|");
}

// A limit on open files stands in for a disk that fails: a folder within cannot be opened.
TEST_F(DataTest, AFolderThatCannotBeReadToItsEndIsAnErrorNotASmallerDataSet) {
  constexpr rlim_t kOpenFiles = 16;
  std::string deep = "a";
  for (rlim_t i = 0; i < 2 * kOpenFiles; ++i) deep += "/a";
  AddText("b.h", "first");
  AddText(deep + "/c.h", "second");
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{.rlim_cur = kOpenFiles, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  const auto result = Pack(Options());
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable) << result.status();
  EXPECT_THAT(result.status().message(), HasSubstr(Options().paths[0] + " broke off"));
  EXPECT_FALSE(fs::exists(Train()));

  ASSERT_TRUE(Pack(Options()).ok());
  EXPECT_EQ(TextOf(*TokenFolder::Open(Train())), "second|first|");
}

TEST_F(DataTest, ManyShardsReadAsOneStream) {
  std::string expected;
  std::vector<uint64_t> starts;
  for (int i = 10; i < 60; ++i) {
    const std::string text = absl::StrCat(std::string(i * i % 13, 'x'), "document", i);
    AddText(absl::StrCat(i), text);
    starts.push_back(expected.size());
    absl::StrAppend(&expected, text, "|");
  }
  PackOptions options = Options();
  options.shard_tokens = 100;
  ASSERT_TRUE(Pack(options).ok());
  const auto folder = TokenFolder::Open(Train());
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_GT(folder->manifest().shards.size(), 4u);
  EXPECT_EQ(TextOf(*folder), expected);
  EXPECT_EQ(folder->DocumentStarts(0, folder->tokens()), starts);
  // A range lies in some of the shards, and knows nothing of those before and behind it.
  const auto begin = starts.begin() + 15, end = starts.begin() + 20;
  EXPECT_EQ(folder->DocumentStarts(*begin - 1, *end), std::vector<uint64_t>(begin, end));
}

TEST_F(DataTest, AShardIsAFileOfItsFolder) {
  AddText("a", "text");
  ASSERT_TRUE(Pack(Options()).ok());
  Manifest manifest = *ReadManifest(Train());
  const std::string good = manifest.shards.at(0);
  for (const std::string& name :
       std::vector<std::string>{"../train/" + good, "/etc/passwd", "..", "", "a/" + good}) {
    manifest.shards[0] = name;
    ASSERT_TRUE(WriteManifest(Train(), manifest).ok());
    const auto folder = TokenFolder::Open(Train());
    EXPECT_EQ(folder.status().code(), absl::StatusCode::kDataLoss) << name;
    EXPECT_THAT(std::string(folder.status().message()), HasSubstr("a file of the same folder"));
  }
}

TEST_F(DataTest, HoldsOutTheAskedShareOfDocumentsAndNeverSharesOne) {
  for (int i = 0; i < 1000; ++i) AddText(absl::StrCat("f", i), absl::StrCat("<", i, ">"));
  PackOptions options = Options();
  options.eval_share = 0.2;
  const auto result = Pack(options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_NEAR(result->eval.documents, 200, 50);
  EXPECT_EQ(result->train.documents + result->eval.documents, 1000u);
}

TEST_F(DataTest, ImportsTokenIdsAndRefusesThoseOutsideTheVocabulary) {
  const uint32_t ids[] = {7, 70000, 3};
  AddText("t.bin", std::string(reinterpret_cast<const char*>(ids), sizeof(ids)));
  PackOptions options = Options();
  options.input = PackOptions::Input::kUint32;
  options.vocabulary = 70001;
  options.separator = 0;
  options.tokenizer = "mine";
  ASSERT_TRUE(Pack(options).ok());
  const auto folder = TokenFolder::Open(Train());
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(folder->token(1), 70000u);

  options.vocabulary = 70000;
  options.output += "2";
  const auto refused = Pack(options);
  EXPECT_THAT(refused.status().message(), HasSubstr("token 70000 at 1 is outside"));
  EXPECT_FALSE(fs::exists(options.output + "/train"));
}

TEST_F(DataTest, TextHasAVocabularyOfItsOwn) {
  AddText("a", "text");
  PackOptions options = Options();
  options.vocabulary = 300;
  EXPECT_THAT(Pack(options).status().message(), HasSubstr("--format uint16 or uint32"));
}

TEST_F(DataTest, RefusesToOverwriteAndNamesTheFolder) {
  AddText("a", "text");
  ASSERT_TRUE(Pack(Options()).ok());
  EXPECT_THAT(Pack(Options()).status().message(), HasSubstr("tokens/train exists"));
}

TEST_F(DataTest, EveryFlippedByteAndEveryTruncationIsFound) {
  AddText("a", "some text to train on");
  ASSERT_TRUE(Pack(Options()).ok());
  const auto size = static_cast<int64_t>(fs::file_size(Shard()));
  for (int64_t offset = 0; offset < size; ++offset) {
    FlipByte(Shard(), offset);
    const auto opened = TokenShard::Open(Shard());
    ASSERT_FALSE(opened.ok()) << "byte " << offset;
    EXPECT_THAT(opened.status().message(), HasSubstr("shard-00000.tokens"));
    FlipByte(Shard(), offset);
  }
  ASSERT_TRUE(TokenShard::Open(Shard()).ok());
  for (int64_t bytes = size - 1; bytes >= 0; bytes -= 5) {
    fs::resize_file(Shard(), bytes);
    EXPECT_EQ(TokenShard::Open(Shard()).status().code(), absl::StatusCode::kDataLoss) << bytes;
  }
}

TEST_F(DataTest, ReadsTheFormatAsItWasReleased) {
  const auto folder = TokenFolder::Open("tests/golden/tokens");
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(TextOf(*folder), "golden|tokens|");
}

TEST_F(DataTest, ADamagedManifestIsAnErrorThatNamesIt) {
  AddText("a", "some text");
  ASSERT_TRUE(Pack(Options()).ok());
  for (const char* text :
       {"", "{", "[]", "{\"format\": 3}", "{\"format\": \"ringleader-tokens\"}"}) {
    ASSERT_TRUE(WriteFileAtomically(Train() + "/manifest.json", text).ok());
    EXPECT_THAT(TokenFolder::Open(Train()).status().message(), HasSubstr("manifest.json")) << text;
  }
}

TEST_F(DataTest, CountsThatAreNotThoseOfItsShardsAreADamagedManifest) {
  AddText("a", "some text");
  AddText("b", "more");
  ASSERT_TRUE(Pack(Options()).ok());
  const Manifest manifest = *ReadManifest(Train());
  Manifest other = manifest;
  ++other.tokens;
  ASSERT_TRUE(WriteManifest(Train(), other).ok());
  EXPECT_THAT(TokenFolder::Open(Train()).status().message(), HasSubstr("manifest.json is damaged"));
  other = manifest;
  ++other.documents;
  ASSERT_TRUE(WriteManifest(Train(), other).ok());
  EXPECT_THAT(TokenFolder::Open(Train()).status().message(),
              HasSubstr("its shards hold 2 documents, it says 3"));
  ASSERT_TRUE(WriteManifest(Train(), manifest).ok());
  EXPECT_TRUE(TokenFolder::Open(Train()).ok());
}

// Token ids 1 and up, 0 the separator, two tasks.
class MarksTest : public DataTest {
 protected:
  MarksTest() {
    AddIds("a", {5, 6, 7, 8});
    AddText("a.marks", std::string("\0\x01\xff\x02", 4));
  }
  void AddIds(const std::string& name, const std::vector<uint16_t>& ids) {
    AddText(name, std::string(reinterpret_cast<const char*>(ids.data()), ids.size() * 2));
  }
  PackOptions MarkedOptions() {
    PackOptions options = Options();
    options.input = PackOptions::Input::kUint16;
    options.vocabulary = 10;
    options.separator = 0;
    options.tokenizer = "mine";
    options.tasks = {"near", "far"};
    return options;
  }
};

TEST_F(MarksTest, AreBesideTheTokensAndSeparatorsAreGiven) {
  AddIds("b", {9});
  AddText("b.marks", "\x02");
  PackOptions options = MarkedOptions();
  options.shard_tokens = 1;
  ASSERT_TRUE(Pack(options).ok());
  const auto folder = TokenFolder::Open(Train());
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(folder->manifest().documents, 2u) << "marks are no documents";
  EXPECT_THAT(folder->manifest().tasks, ::testing::ElementsAre("near", "far"));
  std::vector<int> marks;
  for (uint64_t i = 0; i < folder->tokens(); ++i) marks.push_back(folder->mark(i));
  EXPECT_THAT(marks, ::testing::ElementsAre(0, 1, 255, 2, 255, 2, 255));
}

TEST_F(MarksTest, SayWhichLabelsCountAndWhoseAnswersTheyAre) {
  AddIds("b", {9});
  AddText("b.marks", "\x02");
  ASSERT_TRUE(Pack(MarkedOptions()).ok());
  const auto loader = Loader::Open(Train(), 6, 1, 10);
  ASSERT_TRUE(loader.ok()) << loader.status();
  EXPECT_THAT(loader->tasks(), ::testing::ElementsAre("near", "far"));
  // 5 6 7 8 | 9 |: 7 and the separators are given, and 9 comes after a separator.
  const LocalSequence sequence = testing::ReadOne(*loader, loader->InOrder(0), {.tokens = 6});
  EXPECT_THAT(sequence.labels,
              ::testing::ElementsAre(6, kIgnoreLabel, 8, kIgnoreLabel, kIgnoreLabel, kIgnoreLabel));
  EXPECT_THAT(sequence.answers, ::testing::ElementsAre(1, 0, 2, 0, 0, 0));
}

// What is hidden is its own label, and so its own answer.
TEST_F(MarksTest, SayWhoseAnswersHiddenTokensAre) {
  ASSERT_TRUE(Pack(MarkedOptions()).ok());
  const auto loader = Loader::Open(Train(), 4, 1, 11, {.hidden_share = 1, .hidden_token = 10});
  ASSERT_TRUE(loader.ok()) << loader.status();
  const LocalSequence sequence = testing::ReadOne(*loader, loader->InOrder(0), {.tokens = 4});
  EXPECT_THAT(sequence.tokens, ::testing::ElementsAre(10, 10, 7, 10)) << "7 is given";
  EXPECT_THAT(sequence.labels, ::testing::ElementsAre(5, 6, kIgnoreLabel, 8));
  EXPECT_THAT(sequence.answers, ::testing::ElementsAre(0, 1, 0, 2));
}

TEST(TasksTest, ThereAreAsManyAsThereMayBeAndNoMore) {
  std::vector<std::string> tasks;
  for (size_t i = 0; i < kMaxTasks; ++i) tasks.push_back(absl::StrCat("task-", i));
  EXPECT_EQ(CheckTasks(tasks), absl::OkStatus());
  tasks.emplace_back("one-more");
  EXPECT_THAT(std::string(CheckTasks(tasks).message()), HasSubstr("33 tasks; at most 32"));
  EXPECT_EQ(CheckTasks({std::string(kMaxTaskBytes, 'a')}), absl::OkStatus());
  EXPECT_THAT(std::string(CheckTasks({std::string(kMaxTaskBytes + 1, 'a')}).message()),
              HasSubstr("a name has 1 to 32 bytes"));
}

TEST_F(MarksTest, ThatDoNotFitAreErrorsThatNameTheFile) {
  const auto message = [&] { return std::string(Pack(MarkedOptions()).status().message()); };
  AddText("a.marks", "\1\1\1");
  EXPECT_THAT(message(), HasSubstr("a.marks holds 3 marks for the 4 tokens of a"));
  AddText("a.marks", "\1\1\3\1");
  EXPECT_THAT(message(), HasSubstr("a.marks: mark 3 at 2 is none of 2 tasks"));
  fs::remove(folder_ / "text/a.marks");
  EXPECT_THAT(message(), HasSubstr("a.marks"));
  EXPECT_FALSE(fs::exists(Train()));

  PackOptions options = MarkedOptions();
  options.tasks = {"near", "near"};
  EXPECT_THAT(Pack(options).status().message(), HasSubstr("\"near\" is there twice"));
  options.tasks = {std::string(33, 'x')};
  EXPECT_THAT(Pack(options).status().message(), HasSubstr("1 to 32 bytes"));
  options.tasks.assign(33, "x");
  EXPECT_THAT(Pack(options).status().message(), HasSubstr("33 tasks"));
  options = Options();
  options.tasks = {"near"};
  EXPECT_THAT(Pack(options).status().message(), HasSubstr("tasks are for token ids"));
}

TEST_F(MarksTest, ThatAreDamagedOrWithoutTheirTasksAreFound) {
  ASSERT_TRUE(Pack(MarkedOptions()).ok());
  const auto size = static_cast<int64_t>(fs::file_size(Shard()));
  FlipByte(Shard(), size - 1);
  EXPECT_EQ(TokenFolder::Open(Train()).status().code(), absl::StatusCode::kDataLoss);
  FlipByte(Shard(), size - 1);
  auto manifest = ReadManifest(Train());
  ASSERT_TRUE(manifest.ok());
  manifest->tasks = {"near"};
  ASSERT_TRUE(WriteManifest(Train(), *manifest).ok());
  EXPECT_THAT(TokenFolder::Open(Train()).status().message(), HasSubstr("mark 2 at 3"));
  manifest->tasks = {};
  ASSERT_TRUE(WriteManifest(Train(), *manifest).ok());
  EXPECT_THAT(TokenFolder::Open(Train()).status().message(), HasSubstr("names no task"));
}

TEST_F(MarksTest, ReadsTheFormatAsItWasReleased) {
  const auto folder = TokenFolder::Open("tests/golden/marked-tokens");
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_THAT(folder->manifest().tasks, ::testing::ElementsAre("near", "far"));
  EXPECT_EQ(folder->token(1), 6u);
  EXPECT_EQ(folder->mark(1), 1);
  EXPECT_EQ(folder->mark(3), 2);
  EXPECT_EQ(folder->mark(4), kGivenMark);
}

class LoaderTest : public DataTest {
 protected:
  // Token i of the stream is i mod 251, so a token tells where it comes from.
  LoaderTest() {
    std::string text;
    for (int i = 0; i < 4096; ++i) text += static_cast<char>(1 + i % 251);
    AddText("a", text);
    EXPECT_TRUE(Pack(Options()).ok());
  }
};

TEST_F(LoaderTest, RanksTogetherHoldTheSequenceOnceUnderEveryLayout) {
  const auto loader = Loader::Open(Train(), 256, 1, 257);
  ASSERT_TRUE(loader.ok()) << loader.status();
  const LocalSequence whole = testing::ReadOne(*loader, loader->InOrder(3), {.tokens = 256});
  for (const LayoutKind kind :
       {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    std::set<int64_t> seen;
    for (int rank = 0; rank < 4; ++rank) {
      const ShardLayout layout{.kind = kind, .ranks = 4, .rank = rank, .stripe = 16, .tokens = 256};
      const LocalSequence local = testing::ReadOne(*loader, loader->InOrder(3), layout);
      ASSERT_EQ(local.tokens.size(), 64u);
      for (int i = 0; i < 64; ++i) {
        const int64_t position = local.positions[i];
        seen.insert(position);
        EXPECT_EQ(local.tokens[i], whole.tokens[position]);
        EXPECT_EQ(local.labels[i], whole.labels[position]);
        EXPECT_EQ(layout.Owner(position), rank);
        EXPECT_EQ(layout.LocalIndex(position), i);
      }
    }
    EXPECT_EQ(seen.size(), 256u);
  }
}

// Of a rank of a ring, those that share out heads hold parts that follow each other.
TEST_F(LoaderTest, WhoSharesHeadsHoldsTheRingsRankInParts) {
  const auto loader = Loader::Open(Train(), 256, 1, 257);
  ASSERT_TRUE(loader.ok()) << loader.status();
  const ShardLayout layout{
      .kind = LayoutKind::kStriped, .ranks = 2, .rank = 1, .stripe = 16, .tokens = 256};
  const Sample sample = loader->InOrder(3);
  const LocalSequence whole = loader->Read({&sample, 1}, layout);
  LocalSequence together;
  for (int member = 0; member < 4; ++member) {
    const LocalSequence part = loader->Read({&sample, 1}, layout, {.ranks = 4, .member = member});
    EXPECT_EQ(part.sequence_length, 256);
    EXPECT_EQ(part.tokens.size(), 32u);
    together.tokens.insert(together.tokens.end(), part.tokens.begin(), part.tokens.end());
    together.positions.insert(together.positions.end(), part.positions.begin(),
                              part.positions.end());
    together.labels.insert(together.labels.end(), part.labels.begin(), part.labels.end());
  }
  EXPECT_EQ(together.tokens, whole.tokens);
  EXPECT_EQ(together.positions, whole.positions);
  EXPECT_EQ(together.labels, whole.labels);
}

TEST_F(LoaderTest, LabelsAreTheNextTokens) {
  const auto loader = Loader::Open(Train(), 256, 1, 257);
  ASSERT_TRUE(loader.ok()) << loader.status();
  const LocalSequence first = testing::ReadOne(*loader, loader->InOrder(0), {.tokens = 256});
  const LocalSequence second = testing::ReadOne(*loader, loader->InOrder(1), {.tokens = 256});
  for (int i = 0; i + 1 < 256; ++i) EXPECT_EQ(first.labels[i], first.tokens[i + 1]);
  EXPECT_EQ(first.labels[255], second.tokens[0]);
}

TEST_F(LoaderTest, NothingIsPredictedBehindASeparator) {
  AddText("x", "ab");
  AddText("y", "cd");
  PackOptions options = Options();
  options.paths = {(folder_ / "text/x").string(), (folder_ / "text/y").string()};
  options.output += "2";
  ASSERT_TRUE(Pack(options).ok());
  const auto loader = Loader::Open(options.output + "/train", 5, 1, 257);
  ASSERT_TRUE(loader.ok()) << loader.status();
  EXPECT_THAT(testing::ReadOne(*loader, loader->InOrder(0), {.tokens = 5}).labels,
              ::testing::ElementsAre('b', kByteSeparator, kIgnoreLabel, 'd', kByteSeparator));
}

TEST_F(LoaderTest, DocumentsStartWhereTheyDoInTheSequence) {
  // "abc|de|f|" of two files: the second one's first separator is its own.
  const uint32_t ids[] = {'d', 'e', 0, 'f'};
  const uint32_t letters[] = {'a', 'b', 'c'};
  AddText("x", std::string(reinterpret_cast<const char*>(letters), sizeof(letters)));
  AddText("y", std::string(reinterpret_cast<const char*>(ids), sizeof(ids)));
  PackOptions options = Options();
  options.paths = {(folder_ / "text/x").string(), (folder_ / "text/y").string()};
  options.input = PackOptions::Input::kUint32;
  options.vocabulary = 257;
  options.separator = 0;
  options.tokenizer = "mine";
  for (const uint64_t shard_tokens : {1, 100}) {
    options.output += "2";
    options.shard_tokens = shard_tokens;
    ASSERT_TRUE(Pack(options).ok());
    const auto folder = TokenFolder::Open(options.output + "/train");
    ASSERT_TRUE(folder.ok()) << folder.status();
    EXPECT_THAT(folder->DocumentStarts(0, 9), ::testing::ElementsAre(0, 4, 7));
    EXPECT_THAT(folder->DocumentStarts(1, 7), ::testing::ElementsAre(4));
    EXPECT_THAT(folder->DocumentStarts(4, 8), ::testing::ElementsAre(4, 7));
    const auto loader = Loader::Open(options.output + "/train", 4, 1, 257);
    ASSERT_TRUE(loader.ok()) << loader.status();
    EXPECT_THAT(testing::ReadOne(*loader, loader->InOrder(0), {.tokens = 4}).document_firsts,
                ::testing::ElementsAre(0));
    EXPECT_THAT(testing::ReadOne(*loader, loader->InOrder(1), {.tokens = 4}).document_firsts,
                ::testing::ElementsAre(0, 3));
    // "c|d": begins within a document. Every rank gets those of the whole sequence.
    const auto odd = Loader::Open(options.output + "/train", 2, 1, 257);
    ASSERT_TRUE(odd.ok()) << odd.status();
    EXPECT_THAT(testing::ReadOne(*odd, {.start = 2, .tokens = 4}, {.tokens = 4}).document_firsts,
                ::testing::ElementsAre(0, 2));
    EXPECT_THAT(
        testing::ReadOne(*odd, {.start = 2, .tokens = 4}, {.ranks = 2, .rank = 1, .tokens = 4})
            .document_firsts,
        ::testing::ElementsAre(0, 2));
    // "|de|": only its separator is of the document before.
    const auto edge = Loader::Open(options.output + "/train", 3, 1, 257);
    ASSERT_TRUE(edge.ok()) << edge.status();
    EXPECT_THAT(testing::ReadOne(*edge, {.start = 3, .tokens = 4}, {.tokens = 4}).document_firsts,
                ::testing::ElementsAre(0, 1));
  }
}

TEST_F(LoaderTest, AnEpochIsAPermutationThatTheSeedDecides) {
  const auto order = [&](uint64_t seed, uint64_t epoch) {
    const auto loader = Loader::Open(Train(), 64, seed, 257);
    EXPECT_TRUE(loader.ok()) << loader.status();
    std::vector<int64_t> firsts;
    for (uint64_t i = 0; i < loader->sequences(); ++i) {
      firsts.push_back(testing::ReadOne(*loader, loader->Shuffled(epoch * loader->sequences() + i),
                                        {.tokens = 64})
                           .tokens[0]);
    }
    return firsts;
  };
  EXPECT_EQ(order(1, 0), order(1, 0));
  EXPECT_NE(order(1, 0), order(2, 0));
  EXPECT_NE(order(1, 0), order(1, 1));
  EXPECT_THAT(order(1, 0), ::testing::UnorderedElementsAreArray(order(5, 3)));
}

TEST_F(LoaderTest, SaysHowManyTokensThereAre) {
  EXPECT_THAT(Loader::Open(Train(), 5000, 1, 257).status().message(),
              HasSubstr("holds 4097 tokens; one sequence of 5000 needs 5001"));
  EXPECT_THAT(Loader::Open(Train(), 64, 1, 256).status().message(),
              HasSubstr("vocabulary of 257, the model's vocab_size is 256"));
  const auto loader = Loader::Open(Train(), 1000, 1, 257);
  ASSERT_TRUE(loader.ok()) << loader.status();
  EXPECT_EQ(loader->sequences(), 4u);
  EXPECT_EQ(loader->tokens_left_over(), 96u) << "one more is predicted by the last";
}

TEST_F(LoaderTest, IdsMeanWhatTheModelsTokenizerSays) {
  const Manifest bytes = ReadManifest(Train()).value();
  const std::string model = (folder_ / "model").string();
  std::filesystem::create_directories(model);
  EXPECT_EQ(CheckTokenizer(Train(), bytes, model), absl::OkStatus());
  EXPECT_EQ(CheckTokenizer(Train(), bytes, "random"), absl::OkStatus());
  std::ofstream(model + "/tokenizer.json") << "{}";
  EXPECT_THAT(std::string(CheckTokenizer(Train(), bytes, model).message()),
              HasSubstr("was packed as bytes, and the model in " + model + " has a tokenizer"));
  Manifest ids = bytes;
  ids.tokenizer = "qwen2";
  EXPECT_EQ(CheckTokenizer(Train(), ids, model), absl::OkStatus());

  EXPECT_EQ(CheckPackedAlike("a", ids, "b", ids), absl::OkStatus());
  EXPECT_EQ(
      CheckPackedAlike("a", bytes, "b", ids),
      absl::InvalidArgumentError("a was packed with tokenizer \"bytes\" and separator 256, and b "
                                 "with \"qwen2\" and 256: pack both alike"));
  Manifest other = ids;
  other.tokenizer = "";
  EXPECT_EQ(CheckPackedAlike("a", other, "b", ids), absl::OkStatus()) << "nobody has named it";
  EXPECT_EQ(CheckPackedAlike("a", bytes, "b", other), absl::OkStatus());
  other.separator = 7;
  EXPECT_FALSE(CheckPackedAlike("a", ids, "b", other).ok());
}

}  // namespace
}  // namespace ringleader::data
