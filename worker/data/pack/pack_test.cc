// What packing takes, leaves out and refuses, and what it writes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "base/checksum.h"
#include "base/files.h"
#include "worker/data/testing/packed_text.h"

namespace ringleader::data {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using PackTest = testing::PackedTextTest;
using testing::TextOf;

// Of files of token ids of 16 bits.
PackOptions OfIds(PackOptions options, uint32_t vocabulary, uint32_t separator) {
  options.input = PackOptions::Input::kUint16;
  options.vocabulary = vocabulary;
  options.separator = separator;
  return options;
}

TEST_F(PackTest, RefusesOptionsThatMakeNoSense) {
  AddText("a", "text");
  PackOptions options = Options();
  options.paths.clear();
  EXPECT_EQ(Complaint(options), "no input files or folders");
  options = Options();
  for (const double share : {-0.1, 1.0, std::nan("")}) {
    options.eval_share = share;
    EXPECT_THAT(Complaint(options), HasSubstr("it must be in [0, 1)")) << share;
  }
  options = Options();
  options.paths = {(folder_ / "nowhere").string()};
  EXPECT_THAT(Complaint(options), HasSubstr("cannot read " + options.paths[0]));
  EXPECT_EQ(Pack(options).status().code(), absl::StatusCode::kNotFound);
  const std::string pipe = (folder_ / "pipe").string();
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, std::string("/dev/zero")}) {
    options.paths = {path};
    EXPECT_THAT(Complaint(options), HasSubstr(path + " is neither a file nor a folder"));
  }
  options = Options();
  options.separator = 1;
  EXPECT_THAT(Complaint(options), HasSubstr("are for token ids"));
  options.input = PackOptions::Input::kUint16;
  for (const uint32_t vocabulary : {0u, 1u}) {
    options.vocabulary = vocabulary;
    EXPECT_THAT(Complaint(options), HasSubstr("a separator below it"));
  }
  EXPECT_FALSE(fs::exists(folder_ / "tokens"));
}

// 0 is an ordinary token of most tokenizers.
TEST_F(PackTest, TokenIdsHaveNoSeparatorUnlessItIsGiven) {
  AddText("ids", std::string("\x05\x00", 2));
  PackOptions options = Options();
  options.input = PackOptions::Input::kUint16;
  options.vocabulary = 100;
  EXPECT_THAT(Complaint(options), HasSubstr("got vocabulary 100, no separator; give --vocabulary"));
  options.separator = 0;
  EXPECT_TRUE(Pack(options).ok());
}

TEST_F(PackTest, FilesOfOtherToolsAreCalledWhatTheyAre) {
  const std::string object = R"({"text": "a b"})";
  const std::vector<std::tuple<std::string, std::string, std::string>> foreign = {
      {"one.jsonl", object, "a file of JSON lines"},
      {"lines", object + "\n" + object + "\nrest", "a file of JSON lines"},
      {"part-0.parquet", std::string("PAR1\0\x15", 6), "a Parquet file"},
      {"ids.npy", "\x93NUMPY\x01", "a NumPy array"},
      {"corpus.idx", std::string("MMIDIDX\0\0", 9), "the index of a Megatron data set"},
      {"text.gz", "\x1f\x8b\x08", "compressed (gzip)"},
      {"text.zst", "\x28\xb5\x2f\xfd", "compressed (zstd)"}};
  for (const auto& [name, content, what] : foreign) {
    AddText("good", "text");
    AddText(name, content);
    EXPECT_THAT(Complaint(Options()), HasSubstr(name + " is " + what)) << name;
    PackOptions ids = Options();
    ids.input = PackOptions::Input::kUint16;
    ids.vocabulary = 65536;
    ids.separator = 1;
    ids.paths = {(folder_ / "text" / name).string()};
    EXPECT_THAT(Complaint(ids), HasSubstr(name + " is " + what)) << name;
    ids.max_document_bytes = 1;
    EXPECT_THAT(Complaint(ids), HasSubstr(name + " is " + what)) << name;
    fs::remove(folder_ / "text" / name);
  }
  AddText("corpus.bin", "ab");
  EXPECT_TRUE(Pack(Options()).ok());
  fs::remove_all(folder_ / "tokens");
  AddText("corpus.idx", std::string("MMIDIDX\0\0", 9));
  PackOptions options = Options();
  options.suffixes = {".bin"};
  EXPECT_THAT(Complaint(options), HasSubstr("corpus.bin is half of a Megatron data set"));
}

// 0x8b1f is an ordinary token.
TEST_F(PackTest, TokenIdsMayBeginAsAGzipFileDoes) {
  AddText("ids", std::string("\x1f\x8b\x08\0", 4));
  const PackOptions options = OfIds(Options(), 65536, 1);
  const auto result = Pack(options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->train.tokens, 3u);
}

// What cannot be read may be half of the data.
TEST_F(PackTest, WhatCannotBeReadIsAnError) {
  AddText("a", "text");
  AddText("folder/b", "text");
  fs::permissions(folder_, fs::perms::all);
  const auto complaint = [&] {  // to somebody else than root, who reads everything
    const bool is_root = geteuid() == 0;
    EXPECT_EQ(is_root ? seteuid(65534) : 0, 0);
    const std::string text = Complaint(Options());
    EXPECT_EQ(is_root ? seteuid(0) : 0, 0);
    return text;
  };
  fs::permissions(folder_ / "text/folder", fs::perms::none);
  EXPECT_THAT(complaint(), HasSubstr("broke off: Permission denied"));
  fs::permissions(folder_ / "text/folder", fs::perms::all);
  fs::permissions(folder_ / "text/folder/b", fs::perms::none);
  EXPECT_THAT(complaint(), HasSubstr("text/folder/b"));
}

TEST_F(PackTest, TextThatLooksLikeJsonIsText) {
  AddText("a.json", "{\"one\": 1}\n");
  AddText("b.c", "{\n  int a;\n}\n");
  AddText("c.jsonl", "not an object\n");
  AddText("d", "{\"one\": 1}\nand text\n");
  const auto result = Pack(Options());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->train.documents, 4u);
}

TEST_F(PackTest, LeavesOutWhatIsNoDocumentAndCountsIt) {
  AddText("a", "four");
  AddText("b", "fives");
  AddText("c", "");
  AddText("d", std::string("\0\0\0", 3));
  PackOptions options = Options();
  options.max_document_bytes = 4;
  const auto result = Pack(options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->skipped_files, 3u) << "too long, empty, a NUL";
  EXPECT_EQ(result->too_long_files, 1u);
  EXPECT_EQ(result->first_too_long, folder_ / "text/b");
  EXPECT_EQ(TextOf(*TokenFolder::Open(Train())), "four|");
}

TEST_F(PackTest, WhatIsTooLongIsNamed) {
  AddText("b", "fives");
  PackOptions options = Options();
  options.max_document_bytes = 4;
  EXPECT_THAT(std::string(Pack(options).status().message()),
              AllOf(HasSubstr("among 1 files, of which 1, as"), HasSubstr("text/b"),
                    HasSubstr("--max-document-bytes (4)")));
  options.paths = {folder_ / "text/b"};
  EXPECT_THAT(std::string(Pack(options).status().message()),
              AllOf(HasSubstr("text/b has 5 bytes"), HasSubstr("raise --max-document-bytes")));
}

TEST_F(PackTest, EqualNamesBelowSeveralInputsHaveOneOrder) {
  for (const char* input : {"p", "q"}) {
    fs::create_directories(folder_ / input);
    std::ofstream(folder_ / input / "d") << input;
  }
  PackOptions options = Options();
  options.eval_share = 0;
  for (const bool swapped : {false, true}) {
    options.paths = {folder_ / (swapped ? "q" : "p"), folder_ / (swapped ? "p" : "q")};
    options.output = folder_ / (swapped ? "swapped" : "straight");
    ASSERT_TRUE(Pack(options).ok());
    EXPECT_EQ(TextOf(*TokenFolder::Open(options.output + "/train")), "p|q|");
  }
}

// Below a second input it has another name, by which it could be held out, too.
TEST_F(PackTest, AFileThatSeveralInputsReachIsOneDocument) {
  for (int i = 0; i < 50; ++i) AddText("sub/" + std::to_string(i), "<" + std::to_string(i) + ">");
  PackOptions options = Options();
  options.eval_share = 0.5;
  ASSERT_TRUE(Pack(options).ok());
  const std::string once = TextOf(*TokenFolder::Open(Train()));
  const std::string all = options.paths[0];
  for (const std::string& again : {all, all + "/sub", all + "/sub/../sub/", all + "/sub/7"}) {
    options.paths = {all, again};
    options.output += "2";
    const auto result = Pack(options);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->train.documents + result->eval.documents, 50u) << again;
    EXPECT_EQ(result->repeated_paths, again == all + "/sub/7" ? 1u : 50u) << again;
    EXPECT_THAT(result->first_repeated, HasSubstr(again));
    EXPECT_EQ(TextOf(*TokenFolder::Open(options.output + "/train")), once) << again;
  }
  options.paths = {all, all + "/sub/10"};
  options.output += "2";
  options.max_document_bytes = 3;
  EXPECT_THAT(Complaint(options), HasSubstr("sub/10 has 4 bytes")) << "it is named, too";
}

// As Hugging Face's cache has them: a snapshot is a folder of links to files elsewhere.
TEST_F(PackTest, LinksToFilesAreFollowed) {
  AddText("a", "real");
  std::ofstream(folder_ / "blob") << "linked";
  fs::create_symlink("../blob", folder_ / "text/b.txt");
  fs::create_symlink("b.txt", folder_ / "text/c.txt");
  fs::create_symlink("a", folder_ / "text/0");
  const auto result = Pack(Options());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(TextOf(*TokenFolder::Open(Train())), "real|linked|") << "a file goes before its links";
  EXPECT_EQ(result->repeated_paths, 2u);
  EXPECT_EQ(result->first_repeated, folder_ / "text/c.txt") << "after 0, but of another target";
  EXPECT_EQ(result->skipped_files, 0u);
}

TEST_F(PackTest, LinksToFoldersOrToNothingAreLeftOutAndNamed) {
  fs::create_directories(folder_ / "text");
  fs::create_symlink(".", folder_ / "text/circle");
  fs::create_symlink("itself", folder_ / "text/itself");
  fs::create_symlink("nowhere", folder_ / "text/nowhere.h");
  EXPECT_THAT(Complaint(Options()),
              AllOf(HasSubstr("among 0 files, beside 3 links to folders or to nothing, as "),
                    HasSubstr("text/circle;")));
  AddText("a.txt", "text");
  PackOptions options = Options();
  for (const uint64_t links : {3, 1}) {
    const auto result = Pack(options);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->skipped_links, links);
    EXPECT_EQ(result->skipped_files, links);
    EXPECT_EQ(result->first_skipped_link, folder_ / "text/circle");
    options.output += "-suffix";
    options.suffixes = {".txt"};
  }
}

TEST_F(PackTest, MarksWithoutTasksAreRefusedByName) {
  AddText("a", std::string("\5\0\6\0", 4));
  AddText("a.marks", "\1\1");
  PackOptions options = OfIds(Options(), 10, 9);
  options.suffixes = {"a"};
  for (const std::string& path : {options.paths[0], options.paths[0] + "/a"}) {
    options.paths = {path};
    EXPECT_THAT(Complaint(options), HasSubstr("text/a.marks lies beside "));
    EXPECT_THAT(Complaint(options), HasSubstr("text/a: give --tasks"));
  }
  EXPECT_THAT(Complaint(Options()), HasSubstr("move them away")) << "whose format is forgotten";
  fs::rename(folder_ / "text/a.marks", folder_ / "text/b.marks");
  EXPECT_TRUE(Pack(options).ok());
}

TEST_F(PackTest, AFileThatIsNamedIsTakenWhateverItsSuffix) {
  AddText("a.txt", "named");
  AddText("folder/b.txt", "walked");
  AddText("folder/c.h", "header");
  PackOptions options = Options();
  options.paths = {(folder_ / "text/a.txt").string(), (folder_ / "text/folder").string()};
  options.suffixes = {".h", ".cc"};
  ASSERT_TRUE(Pack(options).ok());
  EXPECT_EQ(TextOf(*TokenFolder::Open(Train())), "named|header|");
}

TEST_F(PackTest, TheManifestSaysWhatIsThere) {
  AddText("a", "abc");
  AddText("b", "de");
  PackOptions options = Options();
  options.shard_tokens = 4;  // "abc|" is as much as one holds
  const auto result = Pack(options);
  ASSERT_TRUE(result.ok()) << result.status();
  const Manifest manifest = ReadManifest(Train()).value();
  EXPECT_EQ(manifest.tokenizer, "bytes");
  EXPECT_EQ(manifest.vocabulary, kByteVocabulary);
  EXPECT_EQ(manifest.separator, kByteSeparator);
  EXPECT_EQ(manifest.tokens, 7u);
  EXPECT_EQ(manifest.documents, 2u);
  EXPECT_THAT(manifest.shards, ::testing::ElementsAre("shard-00000.tokens", "shard-00001.tokens"));
  EXPECT_EQ(result->eval.documents, 0u);
  EXPECT_TRUE(ReadManifest((folder_ / "tokens/eval").string()).ok());
  EXPECT_FALSE(fs::exists(folder_ / "tokens/.packing"));
}

// 9 ends documents: of the first file, whose last one it ends, and of the second, where it is
// added.
TEST_F(PackTest, SeparatorsWithinAFileEndDocuments) {
  AddText("a", std::string("\x05\0\x09\0\x06\0\x07\0\x09\0", 10));
  AddText("b", std::string("\x08\0\x09\0\x05\0", 6));
  const PackOptions options = OfIds(Options(), 10, 9);
  const auto result = Pack(options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->train.tokens, 9u);
  EXPECT_EQ(result->train.documents, 4u);
  const auto folder = TokenFolder::Open(Train());
  ASSERT_TRUE(folder.ok()) << folder.status();
  std::vector<uint32_t> tokens;
  for (uint64_t i = 0; i < folder->tokens(); ++i) tokens.push_back(folder->token(i));
  EXPECT_THAT(tokens, ::testing::ElementsAre(5, 9, 6, 7, 9, 8, 9, 5, 9));
  EXPECT_THAT(folder->DocumentStarts(0, 9), ::testing::ElementsAre(0, 2, 5, 7));
}

TEST_F(PackTest, TokenIdsTakeAsManyBytesAsTheVocabularyNeeds) {
  AddText("ids", std::string("\x05\x00\xff\xff", 4));
  PackOptions options = Options();
  options.input = PackOptions::Input::kUint16;
  options.separator = 0;
  for (const auto& [vocabulary, bytes] : {std::pair{65536u, 2u}, {65537u, 4u}}) {
    options.vocabulary = vocabulary;
    options.output += "-";
    ASSERT_TRUE(Pack(options).ok());
    EXPECT_EQ(TokenShard::Open(options.output + "/train/shard-00000.tokens").value()->token_bytes(),
              bytes);
    const auto folder = TokenFolder::Open(options.output + "/train");
    EXPECT_EQ(folder->token(0), 5u);
    EXPECT_EQ(folder->token(1), 65535u);
    EXPECT_EQ(folder->token(2), 0u) << "the separator";
  }
}

TEST_F(PackTest, HalfATokenIsRefusedByName) {
  AddText("ids", "abc");
  PackOptions options = Options();
  options.input = PackOptions::Input::kUint16;
  options.vocabulary = 65536;
  options.separator = 0;
  EXPECT_THAT(Complaint(options), HasSubstr("text/ids: 3 bytes do not divide by 2"));
  EXPECT_FALSE(fs::exists(folder_ / "tokens/train"));
  EXPECT_FALSE(fs::exists(folder_ / "tokens/.packing"));
}

TEST_F(PackTest, WhatIsHeldOutIsSoByItsPathAlone) {
  for (int i = 0; i < 100; ++i) AddText(std::to_string(i), "<" + std::to_string(i) + ">");
  PackOptions options = Options();
  options.eval_share = 0.5;
  ASSERT_TRUE(Pack(options).ok());
  const std::string few = TextOf(*TokenFolder::Open(options.output + "/eval"));
  for (int i = 100; i < 200; ++i) AddText(std::to_string(i), "x");
  options.output += "-2";
  ASSERT_TRUE(Pack(options).ok());
  std::string more = TextOf(*TokenFolder::Open(options.output + "/eval"));
  for (size_t at = 0; (at = more.find("x|", at)) != std::string::npos;) more.erase(at, 2);
  EXPECT_EQ(more, few);
}

TEST_F(PackTest, AShardHoldsTokensOfTwoOrFourBytes) {
  const uint32_t tokens[] = {1, 65536};
  const uint64_t starts[] = {0};
  const std::string path = (folder_ / "shard").string();
  EXPECT_EQ(WriteShard(path, tokens, starts, 3, {}).message(),
            "token_bytes is 3; 2 and 4 are possible");
  EXPECT_EQ(WriteShard(path, tokens, starts, 2, {}).message(),
            "token 65536 does not fit 2 bytes; use 4");
  ASSERT_TRUE(WriteShard(path, tokens, starts, 4, {}).ok());
  const auto shard = TokenShard::Open(path);
  ASSERT_TRUE(shard.ok()) << shard.status();
  EXPECT_EQ((*shard)->tokens(), 2u);
  EXPECT_EQ((*shard)->token(1), 65536u);
  EXPECT_THAT((*shard)->document_starts(), ::testing::ElementsAre(0));
}

// Whoever wrote it: a shard of sound checksums whose tokens or counts make no sense is no data.
TEST_F(PackTest, AShardIsWhatItsManifestAndItsOwnSizeAllow) {
  AddText("a", "text");
  ASSERT_TRUE(Pack(Options()).ok());
  const auto packed = TokenShard::Open(Shard());
  ASSERT_TRUE(packed.ok()) << packed.status();
  std::vector<uint32_t> tokens;
  for (uint64_t i = 0; i < (*packed)->tokens(); ++i) tokens.push_back((*packed)->token(i));
  const uint64_t starts[] = {0};
  tokens[2] = 60000;
  ASSERT_TRUE(WriteShard(Shard(), tokens, starts, 2, {}).ok());
  EXPECT_THAT(std::string(TokenFolder::Open(Train()).status().message()),
              AllOf(HasSubstr("shard-00000.tokens"),
                    HasSubstr("its token 2 is 60000, of a vocabulary of 257")));

  const std::string whole = ReadFile(Shard()).value();
  const auto opened_with = [&](const std::function<void(ShardHeader&)>& change) {
    ShardHeader header;
    std::memcpy(&header, whole.data(), sizeof(header));
    change(header);
    header.header_checksum = Checksum(&header, offsetof(ShardHeader, header_checksum));
    std::string bytes = whole;
    std::memcpy(bytes.data(), &header, sizeof(header));
    EXPECT_TRUE(WriteFileAtomically(Shard(), bytes).ok());
    return TokenShard::Open(Shard()).status();
  };
  EXPECT_TRUE(opened_with([](ShardHeader&) {}).ok());
  for (const absl::Status& status :
       {opened_with([](ShardHeader& header) { header.tokens = uint64_t{1} << 63; }),
        opened_with([](ShardHeader& header) { header.token_bytes = 0; }),
        opened_with([](ShardHeader& header) { header.documents += uint64_t{1} << 61; })}) {
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("its header's counts"));
  }

  std::filesystem::remove(Shard());
  ASSERT_EQ(mkfifo(Shard().c_str(), 0600), 0);
  EXPECT_THAT(std::string(TokenShard::Open(Shard()).status().message()),
              HasSubstr("not a regular file"));
}

TEST_F(PackTest, AFolderThatLeadsToItselfIsNone) {
  const std::string itself = folder_ / "itself";
  std::filesystem::create_symlink(itself, itself);
  EXPECT_EQ(TokenFolder::Open(itself).status().code(), absl::StatusCode::kNotFound);
}

// It may be opened elsewhere, or later.
TEST_F(PackTest, AShardThatCannotBeOpenedIsNotTakenForMissing) {
  AddText("a", "text");
  ASSERT_TRUE(Pack(Options()).ok());
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status status = TokenShard::Open(Shard()).status();
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(Shard()));
}

// Another version is no damage: the remedy is another program, not packing again.
TEST_F(PackTest, FormatsOfAnotherVersionAreToldFromDamage) {
  AddText("a", "text");
  ASSERT_TRUE(Pack(Options()).ok());
  FlipByte(Shard(), 8);  // the version's lowest byte
  EXPECT_EQ(TokenShard::Open(Shard()).status().code(), absl::StatusCode::kFailedPrecondition);
  FlipByte(Shard(), 8);
  const auto manifest_with = [&](const std::string& from, const std::string& to) {
    const std::string path = Train() + "/manifest.json";
    const std::string original = ReadFile(path).value();
    std::string text = original;
    text.replace(text.find(from), from.size(), to);
    EXPECT_TRUE(WriteFileAtomically(path, text).ok());
    const absl::Status status = TokenFolder::Open(Train()).status();
    EXPECT_TRUE(WriteFileAtomically(path, original).ok());
    return status;
  };
  EXPECT_EQ(manifest_with("\"version\": 1", "\"version\": 2").code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(manifest_with("ringleader-tokens", "other-tokens").code(),
            absl::StatusCode::kInvalidArgument);
  const absl::Status fewer = manifest_with("\"tokens\": 5", "\"tokens\": 6");
  EXPECT_EQ(fewer.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(fewer.message()), HasSubstr("its shards hold 5 tokens, it says 6"));
  EXPECT_EQ(manifest_with("\"separator\": 256", "\"separator\": 257").code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(TokenFolder::Open(Train()).status(), absl::OkStatus());
  const absl::Status none = TokenFolder::Open(folder_.string()).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(none.message()), HasSubstr("ringctl data pack"));
}

}  // namespace
}  // namespace ringleader::data
