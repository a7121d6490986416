#include "kernels/reference/columns.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/reference/attention.h"
#include "kernels/reference/testing/masked_attention.h"

namespace ringleader::kernels::reference {
namespace {

using testing::ComputeMaskedAttention;
using testing::MaskedAttention;
using testing::RandomTensor;
using testing::RelativeError;
using testing::Tensor;

struct Shape {
  int64_t tokens;
  int heads, kv_heads, d, tile;
  int max_columns;
};

// Diagonals and columns together, as vertical-slash attention uses them, on one rank.
class ColumnsTest : public ::testing::TestWithParam<Shape> {
 protected:
  ColumnsTest() {
    const int64_t blocks = (s_.tokens + s_.tile - 1) / s_.tile;
    for (int head = 0; head < s_.heads; ++head) {
      diagonals_.push_back((random_() & random_() & ((uint64_t{1} << blocks) - 1)) | 1);
      std::vector<char> chosen(s_.tokens, 0);
      // The first head has none, the second every slot, the others some.
      const int count = head == 0 ? 0 : head == 1 ? s_.max_columns : random_() % s_.max_columns;
      for (int i = 0; i < count; ++i) chosen[random_() % s_.tokens] = 1;
      counts_.push_back(0);
      for (int64_t p = 0; p < s_.tokens; ++p) {
        if (!chosen[p]) continue;
        positions_.push_back(p);
        ++counts_.back();
      }
      positions_.resize((head + 1) * s_.max_columns, std::numeric_limits<int64_t>::max());
      chosen_.push_back(chosen);
    }
  }

  ColumnSelection Columns() const {
    return {
        .positions = positions_.data(), .counts = counts_.data(), .max_columns = s_.max_columns};
  }
  TileSelection Tiles() const {
    return {.pattern = TilePattern::kToeplitz,
            .tile = s_.tile,
            .diagonals = diagonals_.data(),
            .diagonal_words = 1};
  }
  bool Visible(int head, int64_t i, int64_t j) const {
    if (j > i) return false;
    return (diagonals_[head] >> (i / s_.tile - j / s_.tile) & 1) || chosen_[head][j];
  }

  const Shape s_ = GetParam();
  std::mt19937 random_{11};
  std::vector<uint64_t> diagonals_;
  std::vector<int64_t> positions_;
  std::vector<int32_t> counts_;
  std::vector<std::vector<char>> chosen_;
};

TEST_P(ColumnsTest, DiagonalsAndColumnsEqualMaskedAttention) {
  const Tensor q = RandomTensor(s_.tokens, s_.heads, s_.d, random_);
  const Tensor k = RandomTensor(s_.tokens, s_.kv_heads, s_.d, random_);
  const Tensor v = RandomTensor(s_.tokens, s_.kv_heads, s_.d, random_);
  const Tensor d_out = RandomTensor(s_.tokens, s_.heads, s_.d, random_);
  const float scale = 1.0f / std::sqrt(static_cast<float>(s_.d));
  const ShardLayout layout{.tokens = s_.tokens};
  Engine engine(2);

  const size_t size = int64_t{s_.heads} * s_.max_columns * s_.d;
  std::vector<float> keys(size), values(size), d_keys(size), d_values(size);
  GatherColumns(k.view(), v.view(), layout, Columns(), s_.heads, keys.data(), values.data());
  Tensor out(s_.tokens, s_.heads, s_.d), dq = out, dk(s_.tokens, s_.kv_heads, s_.d), dv = dk;
  std::vector<float> lse(s_.heads * s_.tokens, -std::numeric_limits<float>::infinity());
  std::vector<float> delta(lse.size());
  ASSERT_TRUE(AttentionForward(engine, {.q = q.view(),
                                        .k = k.view(),
                                        .v = v.view(),
                                        .out = out.view(),
                                        .lse = lse.data(),
                                        .query_layout = layout,
                                        .key_layout = layout,
                                        .tiles = Tiles(),
                                        .scale = scale})
                  .ok());
  ASSERT_TRUE(ColumnForward(engine, {.q = q.view(),
                                     .keys = keys.data(),
                                     .values = values.data(),
                                     .columns = Columns(),
                                     .tiles = Tiles(),
                                     .query_layout = layout,
                                     .out = out.view(),
                                     .lse = lse.data(),
                                     .scale = scale})
                  .ok());
  AttentionDelta(engine, d_out.view(), std::as_const(out).view(), delta.data());
  ASSERT_TRUE(ColumnBackward(engine, {.q = q.view(),
                                      .d_out = d_out.view(),
                                      .keys = keys.data(),
                                      .values = values.data(),
                                      .columns = Columns(),
                                      .tiles = Tiles(),
                                      .query_layout = layout,
                                      .lse = lse.data(),
                                      .delta = delta.data(),
                                      .dq = dq.view(),
                                      .d_keys = d_keys.data(),
                                      .d_values = d_values.data(),
                                      .scale = scale})
                  .ok());
  ASSERT_TRUE(AttentionBackward(engine, {.q = q.view(),
                                         .k = k.view(),
                                         .v = v.view(),
                                         .d_out = d_out.view(),
                                         .lse = lse.data(),
                                         .delta = delta.data(),
                                         .dq = dq.view(),
                                         .dk = dk.view(),
                                         .dv = dv.view(),
                                         .query_layout = layout,
                                         .key_layout = layout,
                                         .tiles = Tiles(),
                                         .scale = scale})
                  .ok());
  ScatterColumns(d_keys.data(), d_values.data(), layout, Columns(), s_.heads, dk.view(), dv.view());

  const MaskedAttention expected = ComputeMaskedAttention(
      q, k, v, d_out, scale, [&](int head, int64_t i, int64_t j) { return Visible(head, i, j); });
  EXPECT_LT(RelativeError(out.data, expected.out), 1e-5);
  EXPECT_LT(RelativeError(lse, expected.lse), 1e-5);
  EXPECT_LT(RelativeError(dq.data, expected.dq), 1e-5);
  EXPECT_LT(RelativeError(dk.data, expected.dk), 1e-5);
  EXPECT_LT(RelativeError(dv.data, expected.dv), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ColumnsTest,
    ::testing::Values(Shape{700, 4, 4, 64, 64, 130}, Shape{1000, 8, 2, 64, 128, 300},
                      Shape{777, 14, 2, 128, 64, 65}, Shape{50, 4, 4, 128, 64, 10}),
    [](const auto& info) {
      return "n" + std::to_string(info.param.tokens) + "d" + std::to_string(info.param.d);
    });

TEST(ColumnArgumentsTest, ErrorsNameTheArgument) {
  Engine engine(1);
  const Tensor q(64, 1, 64);
  const std::vector<int64_t> positions(4);
  const std::vector<int32_t> counts = {5};
  const uint64_t diagonals = 1;
  ColumnForwardArgs args;
  args.q = q.view();
  args.keys = args.values = q.data.data();
  args.columns = {.positions = positions.data(), .counts = counts.data(), .max_columns = 4};
  args.tiles = {
      .pattern = TilePattern::kToeplitz, .tile = 64, .diagonals = &diagonals, .diagonal_words = 1};
  args.query_layout = {.tokens = 64};
  const absl::Status status = ColumnForward(engine, args);
  EXPECT_NE(std::string(status.message()).find("counts[0] is 5"), std::string::npos) << status;
}

}  // namespace
}  // namespace ringleader::kernels::reference
