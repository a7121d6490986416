#include "kernels/reference/attention/columns.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/testing/attention_problem.h"

namespace ringleader::kernels::reference {
namespace {

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
      positions_.resize(int64_t{head + 1} * s_.max_columns, std::numeric_limits<int64_t>::max());
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
  const testing::AttentionProblem problem(s_.tokens, s_.heads, s_.kv_heads, s_.d, 11);
  Engine engine(2);
  const ColumnSelection columns = Columns();
  testing::ExpectNear(
      problem.Run(engine, Tiles(), &columns),
      problem.Expected([&](int head, int64_t i, int64_t j) { return Visible(head, i, j); }));
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
