// What is not supported is named, before a device is asked for: these tests run everywhere.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_format.h"
#include "kernels/sm90/attention.h"
#include "kernels/sm90/testing/unread.h"

namespace ringleader::kernels::sm90 {
namespace {

// Checked before a device is asked for, so these run everywhere.
class ArgumentTest : public ::testing::Test {
 protected:
  AttentionForwardArgs<__nv_bfloat16> args_ = [] {
    AttentionForwardArgs<__nv_bfloat16> args;
    auto* const data = Unread<__nv_bfloat16>();
    args.q = {data, 256, 4, 128, 512, 128};
    args.k = args.v = {data, 256, 2, 128, 256, 128};
    args.out = {Unread<float>(), 256, 4, 128, 512, 128};
    args.lse = args.out.data;
    args.query_layout.tokens = args.key_layout.tokens = 256;
    args.scale = 1;
    return args;
  }();
  std::string Message() const {
    const absl::Status status = AttentionForward(args_, {Unread<char>(), 1 << 20}, nullptr);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  }
};

TEST_F(ArgumentTest, NamesHeadDim) {
  args_.q.head_dim = 96;
  EXPECT_THAT(Message(), ::testing::HasSubstr("q.head_dim is 96"));
}
TEST_F(ArgumentTest, NamesHeads) {
  args_.k.heads = 3;
  EXPECT_THAT(Message(), ::testing::HasSubstr("k.heads 3"));
}
TEST_F(ArgumentTest, NamesTile) {
  args_.tiles.tile = 32;
  EXPECT_THAT(Message(), ::testing::HasSubstr("tiles.tile is 32"));
}
TEST_F(ArgumentTest, NamesMissingLists) {
  args_.tiles.pattern = TilePattern::kCsr;
  EXPECT_THAT(Message(), ::testing::HasSubstr("tiles.row_offsets"));
  args_.tiles.pattern = TilePattern::kToeplitz;
  EXPECT_THAT(Message(), ::testing::HasSubstr("tiles.diagonals"));
}
TEST_F(ArgumentTest, NamesDocumentsWithoutACausalMask) {
  args_.tiles.pattern = TilePattern::kFull;
  args_.tiles.document_starts = Unread<int32_t>();
  EXPECT_THAT(Message(), ::testing::HasSubstr("tiles.document_starts goes with causal patterns"));
}
TEST_F(ArgumentTest, NamesMisalignedDocuments) {
  args_.tiles.document_starts = Unread<int32_t>(2);
  EXPECT_THAT(Message(), ::testing::HasSubstr("tiles.document_starts must be aligned"));
}
TEST_F(ArgumentTest, NamesWhatIntervalsDoNotGoWith) {
  args_.tiles.intervals = Unread<KeyIntervals>();
  EXPECT_THAT(Message(), ::testing::HasSubstr("tiles.intervals goes with kFull"));
  args_.tiles.pattern = TilePattern::kCsr;
  args_.tiles.document_starts = Unread<int32_t>();
  EXPECT_THAT(Message(), ::testing::HasSubstr("tiles.intervals beside document_starts"));
}
TEST_F(ArgumentTest, NamesMisalignedIntervals) {
  args_.tiles.pattern = TilePattern::kFull;
  args_.tiles.intervals = reinterpret_cast<const KeyIntervals*>(Unread<int32_t>(4));
  EXPECT_THAT(Message(), ::testing::HasSubstr("tiles.intervals must be aligned to 16 bytes"));
}
TEST_F(ArgumentTest, NamesMoreIntervalsThanThereIsMemoryFor) {
  args_.tiles = {.pattern = TilePattern::kFull, .tile = 64, .intervals = Unread<KeyIntervals>()};
  args_.q.tokens = args_.out.tokens = args_.k.tokens = args_.v.tokens = int64_t{1} << 24;
  args_.query_layout.tokens = args_.key_layout.tokens = int64_t{1} << 24;
  EXPECT_THAT(Message(), ::testing::HasSubstr("16777216 keys with tiles of 64 tokens: too many"));
}
TEST_F(ArgumentTest, IntervalsNeedMoreWorkspace) {
  const int64_t before = ForwardWorkspaceBytes(args_);
  args_.tiles.pattern = TilePattern::kFull;
  args_.tiles.intervals = Unread<KeyIntervals>();
  // 256 queries' intervals, and a word of two bits for each line of two tiles, both ways.
  EXPECT_EQ(ForwardWorkspaceBytes(args_), before + 256 * 16 + 256);
}
TEST_F(ArgumentTest, NamesLayoutThatCutsTiles) {
  args_.query_layout = {.kind = LayoutKind::kStriped, .ranks = 2, .stripe = 96, .tokens = 512};
  EXPECT_THAT(Message(), ::testing::HasSubstr("query_layout: runs of 96"));
}
TEST_F(ArgumentTest, NamesShapeOfOutput) {
  args_.out.heads = 2;
  EXPECT_THAT(Message(), ::testing::HasSubstr("out is [256, 2, 128]"));
}
TEST_F(ArgumentTest, WantsOneOutput) {
  args_.rounded_out = {Unread<__nv_bfloat16>(), 256, 4, 128, 512, 128};
  EXPECT_THAT(Message(), ::testing::HasSubstr("out and rounded_out both have data"));
  args_.out = {};
  args_.rounded_out.tokens = 255;
  EXPECT_THAT(Message(), ::testing::HasSubstr("rounded_out is [255, 4, 128]"));
  args_.rounded_out.tokens = 256;
  args_.rounded_out.data = Unread<__nv_bfloat16>(2);
  EXPECT_THAT(Message(), ::testing::HasSubstr("rounded_out: data must be aligned to 4 bytes"));
}
TEST_F(ArgumentTest, GroupsOfKeysAddToAnOutputInFp32) {
  args_.out = {};
  args_.rounded_out = {Unread<__nv_bfloat16>(), 256, 4, 128, 512, 128};
  args_.tiles.pattern = TilePattern::kToeplitz;
  args_.tiles.tile = kGroupTile;
  args_.tiles.diagonals = Unread<uint64_t>();
  args_.tiles.diagonal_words = 1;
  args_.tiles.groups = {Unread<int32_t>(), Unread<int32_t>(), Unread<int32_t>(), 8};
  EXPECT_THAT(Message(), ::testing::HasSubstr("rounded_out: groups of keys"));
}
TEST_F(ArgumentTest, NamesNullPointer) {
  args_.lse = nullptr;
  EXPECT_THAT(Message(), ::testing::HasSubstr("lse is null"));
}
TEST_F(ArgumentTest, NamesScale) {
  args_.scale = 0;
  EXPECT_THAT(Message(), ::testing::HasSubstr("scale is 0"));
}

class BackwardArgumentTest : public ::testing::Test {
 protected:
  AttentionBackwardArgs<__nv_bfloat16> args_ = [] {
    AttentionBackwardArgs<__nv_bfloat16> args;
    auto* const data = Unread<__nv_bfloat16>();
    auto* const floats = Unread<float>();
    args.q = args.d_out = {data, 256, 4, 128, 512, 128};
    args.k = args.v = {data, 256, 2, 128, 256, 128};
    args.dq = {floats, 256, 4, 128, 512, 128};
    args.dk = args.dv = {floats, 256, 2, 128, 256, 128};
    args.lse = args.delta = floats;
    args.query_layout.tokens = args.key_layout.tokens = 256;
    args.scale = 1;
    return args;
  }();
  std::string Message() const {
    const absl::Status status = AttentionBackward(args_, {Unread<char>(), 1 << 20}, nullptr);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  }
};

TEST_F(BackwardArgumentTest, NamesShapes) {
  args_.d_out.tokens = 255;
  EXPECT_THAT(Message(), ::testing::HasSubstr("d_out is [255, 4, 128]"));
  args_.d_out.tokens = 256;
  args_.dk.heads = 4;
  EXPECT_THAT(Message(), ::testing::HasSubstr("dk is [256, 4, 128]; it must be [256, 2, 128]"));
}
TEST_F(BackwardArgumentTest, NamesNullPointers) {
  args_.delta = nullptr;
  EXPECT_THAT(Message(), ::testing::HasSubstr("delta is null"));
  args_.dv.data = nullptr;
  EXPECT_THAT(Message(), ::testing::HasSubstr("dv: data is null"));
}
TEST_F(BackwardArgumentTest, NamesListsOfTheDirection) {
  args_.tiles.pattern = TilePattern::kCsr;
  EXPECT_THAT(Message(), ::testing::HasSubstr("tiles.column_offsets"));
  const int32_t list = 0;
  args_.tiles.column_offsets = args_.tiles.rows = &list;
  args_.deterministic = true;
  EXPECT_THAT(Message(), ::testing::HasSubstr("tiles.row_offsets"));
}
TEST_F(BackwardArgumentTest, WantsGradientsOfOneType) {
  auto* const data = Unread<__nv_bfloat16>();
  args_.rounded_dk = args_.rounded_dv = {data, 256, 2, 128, 256, 128};
  EXPECT_THAT(Message(), ::testing::HasSubstr("dk or dv beside rounded_dk or rounded_dv"));
  args_.dk = args_.dv = {};
  args_.rounded_dv = {};
  EXPECT_THAT(Message(), ::testing::HasSubstr("rounded_dv: data is null"));
  args_.rounded_dv = {data + 1, 256, 2, 128, 256, 128};
  EXPECT_THAT(Message(), ::testing::HasSubstr("rounded_dv: data must be aligned to 16 bytes"));
}
TEST_F(BackwardArgumentTest, RoundedGradientsNeedMoreWorkspace) {
  const int64_t before = BackwardWorkspaceBytes(args_);
  args_.rounded_dk = args_.rounded_dv = {Unread<__nv_bfloat16>(), 256, 2, 128, 256, 128};
  args_.dk = args_.dv = {};
  EXPECT_EQ(BackwardWorkspaceBytes(args_), before + int64_t{2} * 256 * 2 * 128 * 4);
}

TEST(WorkspaceTest, TooSmallSaysHowMuch) {
  AttentionForwardArgs<__nv_bfloat16> args;
  auto* const data = Unread<__nv_bfloat16>();
  args.q = args.k = args.v = {data, 128, 1, 64, 64, 64};
  args.out = {Unread<float>(), 128, 1, 64, 64, 64};
  args.lse = args.out.data;
  args.query_layout.tokens = args.key_layout.tokens = 128;
  args.scale = 1;
  EXPECT_THAT(std::string(AttentionForward(args, {}, nullptr).message()),
              ::testing::HasSubstr(absl::StrFormat("%d needed", ForwardWorkspaceBytes(args))));
}

}  // namespace
}  // namespace ringleader::kernels::sm90
