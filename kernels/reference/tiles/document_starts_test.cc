// Documents packed into one sequence: every pattern, tile, layout and selected columns under the
// mask, against the oracle and against the documents alone.
#include "kernels/reference/tiles/document_starts.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/reference/attention/attention.h"
#include "kernels/reference/testing/attention_problem.h"
#include "kernels/reference/testing/packed_documents.h"

namespace ringleader::kernels::reference {
namespace {

using testing::AttentionProblem;
using testing::AttentionResult;
using testing::DocumentStarts;
using testing::ExpectNear;
using testing::RandomDocuments;
using testing::Tensor;

// Diagonals, columns and lists of tiles at random, the same from the same seed.
struct RandomSelections {
  int64_t tokens;
  int heads, tile;
  std::vector<uint64_t> diagonals;
  static constexpr int kMaxColumns = 150;
  std::vector<std::vector<char>> chosen;  // [heads, tokens]
  std::vector<int64_t> positions;
  std::vector<int32_t> counts, row_offsets, columns;
  std::vector<char> listed;  // [heads, tiles, tiles]

  RandomSelections(int64_t tokens, int heads, int tile, int seed)
      : tokens(tokens), heads(heads), tile(tile) {
    std::mt19937 random(seed);
    const int64_t tiles = (tokens + tile - 1) / tile;
    for (int head = 0; head < heads; ++head) {
      diagonals.push_back((random() & random()) | 1);
      std::vector<char>& of_head = chosen.emplace_back(tokens, 0);
      for (int i = 0; i < kMaxColumns; ++i) of_head[random() % tokens] = 1;
      counts.push_back(0);
      for (int64_t p = 0; p < tokens; ++p) {
        if (!of_head[p]) continue;
        positions.push_back(p);
        ++counts.back();
      }
      positions.resize(int64_t{head + 1} * kMaxColumns, std::numeric_limits<int64_t>::max());
      for (int64_t a = 0; a < tiles; ++a) {
        row_offsets.push_back(static_cast<int32_t>(columns.size()));
        for (int64_t b = 0; b < tiles; ++b) {
          listed.push_back(b <= a && (b == a || random() % 2 == 0));
          if (listed.back()) columns.push_back(static_cast<int32_t>(b));
        }
      }
      row_offsets.push_back(static_cast<int32_t>(columns.size()));
    }
  }

  TileSelection Select(TilePattern pattern, const std::vector<int32_t>& starts) const {
    return {.pattern = pattern,
            .tile = tile,
            .window = 70,
            .diagonals = diagonals.data(),
            .diagonal_words = 1,
            .row_offsets = row_offsets.data(),
            .columns = columns.data(),
            .document_starts = starts.data()};
  }
  ColumnSelection Columns() const {
    return {.positions = positions.data(), .counts = counts.data(), .max_columns = kMaxColumns};
  }
  // No mask is set.
  bool Visible(TilePattern pattern, int head, int64_t i, int64_t j) const {
    if (j > i) return false;
    const int64_t a = i / tile, b = j / tile, tiles = (tokens + tile - 1) / tile;
    if (pattern == TilePattern::kWindow) return i - j < 70;
    if (pattern == TilePattern::kToeplitz) return diagonals[head] >> (a - b) & 1;
    if (pattern == TilePattern::kCsr) return listed[(head * tiles + a) * tiles + b];
    return true;
  }
};

constexpr TilePattern kPatterns[] = {TilePattern::kCausal, TilePattern::kWindow,
                                     TilePattern::kToeplitz, TilePattern::kCsr};

struct Shape {
  int64_t tokens;
  int heads, kv_heads, d, tile;
};

class DocumentsTest : public ::testing::TestWithParam<Shape> {
 protected:
  const Shape s_ = GetParam();
  const AttentionProblem problem_{s_.tokens, s_.heads, s_.kv_heads, s_.d, 21};
  const RandomSelections selections_{s_.tokens, s_.heads, s_.tile, 22};
  Engine engine_{2};
};

TEST_P(DocumentsTest, EqualMaskedAttention) {
  std::mt19937 random(23);
  const std::vector<std::vector<int64_t>> packings = {{0},
                                                      {0, s_.tokens - 1},
                                                      {0, 1, 2, s_.tokens / 2},
                                                      RandomDocuments(s_.tokens, s_.tile, random),
                                                      RandomDocuments(s_.tokens, s_.tile, random)};
  for (const std::vector<int64_t>& firsts : packings) {
    const std::vector<int32_t> starts = DocumentStarts(s_.tokens, firsts);
    for (const TilePattern pattern : kPatterns) {
      SCOPED_TRACE(static_cast<int>(pattern));
      ExpectNear(problem_.Run(engine_, selections_.Select(pattern, starts)),
                 problem_.Expected([&](int head, int64_t i, int64_t j) {
                   return j >= starts[i] && selections_.Visible(pattern, head, i, j);
                 }));
    }
    const ColumnSelection columns = selections_.Columns();
    ExpectNear(problem_.Run(engine_, selections_.Select(TilePattern::kToeplitz, starts), &columns),
               problem_.Expected([&](int head, int64_t i, int64_t j) {
                 return j >= starts[i] && j <= i &&
                        (selections_.Visible(TilePattern::kToeplitz, head, i, j) ||
                         selections_.chosen[head][j]);
               }));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, DocumentsTest,
                         ::testing::Values(Shape{700, 4, 2, 64, 64}, Shape{613, 2, 2, 64, 128},
                                           Shape{65, 2, 1, 32, 64}),
                         [](const auto& info) {
                           return "n" + std::to_string(info.param.tokens) + "t" +
                                  std::to_string(info.param.tile);
                         });

// Every document alone, at its own positions from 0, gives the rows of the packed sequence.
TEST(PackedDocumentsTest, EqualTheDocumentsAlone) {
  constexpr int64_t kTokens = 640;
  const AttentionProblem packed(kTokens, 4, 2, 64, 24);
  const std::vector<int64_t> firsts = {0, 1, 64, 100, 101, 356, 512};
  const std::vector<int32_t> starts = DocumentStarts(kTokens, firsts);
  Engine engine(2);
  const AttentionResult result = packed.Run(engine, {.tile = 64, .document_starts = starts.data()});
  for (size_t i = 0; i < firsts.size(); ++i) {
    const int64_t first = firsts[i], n = (i + 1 < firsts.size() ? firsts[i + 1] : kTokens) - first;
    const auto rows = [&](const Tensor& whole) {
      Tensor part(n, whole.heads, whole.head_dim);
      const auto begin = whole.data.begin() + first * whole.heads * whole.head_dim;
      part.data.assign(begin, begin + n * whole.heads * whole.head_dim);
      return part;
    };
    AttentionProblem alone(n, 4, 2, 64, 0);
    alone.q = rows(packed.q);
    alone.k = rows(packed.k);
    alone.v = rows(packed.v);
    alone.d_out = rows(packed.d_out);
    AttentionResult part{rows(result.out), rows(result.dq), rows(result.dk), rows(result.dv), {}};
    for (int head = 0; head < 4; ++head) {
      const auto begin = result.lse.begin() + head * kTokens + first;
      part.lse.insert(part.lse.end(), begin, begin + n);
    }
    ExpectNear(part, alone.Run(engine, {.tile = 64}));
  }
}

class DocumentShardsTest : public ::testing::TestWithParam<std::tuple<LayoutKind, int>> {};

TEST_P(DocumentShardsTest, SumOfOwnersEqualsOneCall) {
  const auto [kind, ranks] = GetParam();
  const AttentionProblem whole(1024, 4, 2, 64, 25);
  const RandomSelections selections(1024, 4, 64, 26);
  const ShardLayout layout{.kind = kind, .ranks = ranks, .stripe = 128, .tokens = whole.q.tokens};
  std::mt19937 random(27);
  Engine engine(2);
  for (const std::vector<int64_t>& firsts :
       {std::vector<int64_t>{0, 1000}, RandomDocuments(1024, 64, random)}) {
    const std::vector<int32_t> starts = DocumentStarts(1024, firsts);
    for (const TilePattern pattern : {TilePattern::kCausal, TilePattern::kWindow}) {
      const TileSelection tiles = selections.Select(pattern, starts);
      ExpectNear(whole.RunRing(engine, tiles, nullptr, layout), whole.Run(engine, tiles));
    }
    const TileSelection tiles = selections.Select(TilePattern::kToeplitz, starts);
    const ColumnSelection columns = selections.Columns();
    ExpectNear(whole.RunRing(engine, tiles, &columns, layout), whole.Run(engine, tiles, &columns));
  }
}
INSTANTIATE_TEST_SUITE_P(Layouts, DocumentShardsTest,
                         ::testing::Combine(::testing::Values(LayoutKind::kContiguous,
                                                              LayoutKind::kZigzag,
                                                              LayoutKind::kStriped),
                                            ::testing::Values(1, 2, 4)));

// Forward of 256 tokens; what it says and how many tiles of 64 it visits.
class DocumentCallsTest : public ::testing::Test {
 protected:
  absl::Status Forward(const std::vector<int32_t>& starts,
                       TilePattern pattern = TilePattern::kCausal) {
    Engine engine(1);
    const Tensor q(256, 1, 64);
    Tensor out(256, 1, 64);
    std::vector<float> lse(256);
    return AttentionForward(
        engine,
        {.q = q.view(),
         .k = q.view(),
         .v = q.view(),
         .out = out.view(),
         .lse = lse.data(),
         .query_layout = {.tokens = 256},
         .key_layout = {.tokens = 256},
         .tiles = {.pattern = pattern, .tile = 64, .document_starts = starts.data()},
         .scale = 0.125f},
        &visited_);
  }
  int64_t visited_ = 0;
};

TEST_F(DocumentCallsTest, HiddenTilesAreNotVisited) {
  ASSERT_EQ(Forward(DocumentStarts(256, {0})), absl::OkStatus());
  EXPECT_EQ(visited_, 10);
  ASSERT_EQ(Forward(DocumentStarts(256, {0, 64, 128, 192})), absl::OkStatus());
  EXPECT_EQ(visited_, 4);
  // The second tile's first row belongs to the first document still, the fourth's to the second.
  ASSERT_EQ(Forward(DocumentStarts(256, {0, 65, 200})), absl::OkStatus());
  EXPECT_EQ(visited_, 1 + 2 + 2 + 3);
}

TEST_F(DocumentCallsTest, WrongStartsAreRefused) {
  const auto message = [this](const std::vector<int32_t>& starts, TilePattern pattern) {
    return std::string(Forward(starts, pattern).message());
  };
  const auto expect = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find("document_starts"), std::string::npos) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  std::vector<int32_t> starts = DocumentStarts(256, {0, 100});
  expect(message(starts, TilePattern::kFull), "kFull");
  starts[150] = 151;
  expect(message(starts, TilePattern::kCausal), "[150] is 151");
  starts[150] = 99;  // descends
  expect(message(starts, TilePattern::kCausal), "[150] is 99 after 100");
  starts[150] = 120;  // within a document whose queries began before
  expect(message(starts, TilePattern::kCausal), "[150] is 120 after 100");
  starts[0] = -1;
  expect(message(starts, TilePattern::kCausal), "[0] is -1");
}

TEST_F(DocumentCallsTest, WrongStartsOfColumnsAreRefused) {
  Engine engine(1);
  const Tensor q(64, 1, 64);
  Tensor out(64, 1, 64);
  std::vector<float> lse(64);
  const std::vector<int64_t> positions(1);
  const std::vector<int32_t> counts = {1}, starts(64, 1);
  const uint64_t diagonals = 1;
  const absl::Status status = ColumnForward(
      engine,
      {.q = q.view(),
       .keys = q.data.data(),
       .values = q.data.data(),
       .columns = {.positions = positions.data(), .counts = counts.data(), .max_columns = 1},
       .tiles = {.pattern = TilePattern::kToeplitz,
                 .tile = 64,
                 .diagonals = &diagonals,
                 .diagonal_words = 1,
                 .document_starts = starts.data()},
       .query_layout = {.tokens = 64},
       .out = out.view(),
       .lse = lse.data(),
       .scale = 0.125f});
  EXPECT_NE(std::string(status.message()).find("document_starts[0] is 1"), std::string::npos)
      << status;
}

}  // namespace
}  // namespace ringleader::kernels::reference
