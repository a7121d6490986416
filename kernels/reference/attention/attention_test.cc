#include "kernels/reference/attention/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/reference/testing/attention_problem.h"
#include "kernels/reference/tiles/tile_lists.h"

namespace ringleader::kernels::reference {
namespace {

using testing::ExpectNear;
using Problem = testing::AttentionProblem;
using Result = testing::AttentionResult;
using testing::Tensor;

// Random tiles at or below the diagonal, with a query tile and a key tile left out altogether.
struct RandomCsr {
  std::vector<int32_t> row_offsets, columns;
  std::set<std::tuple<int, int64_t, int64_t>> listed;

  RandomCsr(int heads, int64_t tiles, int seed) {
    std::mt19937 random(seed);
    for (int head = 0; head < heads; ++head) {
      for (int64_t a = 0; a < tiles; ++a) {
        row_offsets.push_back(static_cast<int32_t>(columns.size()));
        for (int64_t b = 0; b <= a; ++b) {
          if (a == 1 || b == 2 || random() % 3 == 0) continue;
          columns.push_back(static_cast<int32_t>(b));
          listed.insert({head, a, b});
        }
      }
      row_offsets.push_back(static_cast<int32_t>(columns.size()));
    }
  }
};

struct Shape {
  int64_t tokens;
  int heads, kv_heads, d, tile;
};

class AttentionTest : public ::testing::TestWithParam<Shape> {
 protected:
  Shape shape_ = GetParam();
  Problem problem_{shape_.tokens, shape_.heads, shape_.kv_heads, shape_.d, 1};
  Engine engine_{2};
  int64_t blocks_ = TileCount(shape_.tokens, shape_.tile);
};

TEST_P(AttentionTest, Full) {
  ExpectNear(problem_.Run(engine_, {.pattern = TilePattern::kFull, .tile = shape_.tile}),
             problem_.Expected([](int, int64_t, int64_t) { return true; }));
}

TEST_P(AttentionTest, Causal) {
  ExpectNear(problem_.Run(engine_, {.pattern = TilePattern::kCausal, .tile = shape_.tile}),
             problem_.Expected([](int, int64_t i, int64_t j) { return j <= i; }));
}

TEST_P(AttentionTest, Window) {
  for (const int64_t window : {1, 37, 150}) {
    ExpectNear(
        problem_.Run(engine_,
                     {.pattern = TilePattern::kWindow, .tile = shape_.tile, .window = window}),
        problem_.Expected([&](int, int64_t i, int64_t j) { return j <= i && i - j < window; }));
  }
}

TEST_P(AttentionTest, Toeplitz) {
  std::mt19937 random(3);
  std::vector<uint64_t> diagonals(shape_.heads);
  for (uint64_t& word : diagonals) word = random() | 1;
  ExpectNear(problem_.Run(engine_, {.pattern = TilePattern::kToeplitz,
                                    .tile = shape_.tile,
                                    .diagonals = diagonals.data(),
                                    .diagonal_words = 1}),
             problem_.Expected([&](int head, int64_t i, int64_t j) {
               return j <= i && (diagonals[head] >> (i / shape_.tile - j / shape_.tile) & 1);
             }));
}

TEST_P(AttentionTest, Csr) {
  const RandomCsr csr(shape_.heads, blocks_, 4);
  ExpectNear(problem_.Run(engine_, {.pattern = TilePattern::kCsr,
                                    .tile = shape_.tile,
                                    .row_offsets = csr.row_offsets.data(),
                                    .columns = csr.columns.data()}),
             problem_.Expected([&](int head, int64_t i, int64_t j) {
               return j <= i && csr.listed.contains({head, i / shape_.tile, j / shape_.tile});
             }));
}

// Only those queries of a listed tile attend that chose the block: none, some or all.
TEST_P(AttentionTest, CsrWhereQueriesChoose) {
  std::mt19937 random(9);
  const RandomCsr csr(shape_.heads, blocks_, 4);
  const int64_t blocks = (blocks_ + 1) / 2, words = QueryWords(shape_.tokens);
  std::vector<uint32_t> chosen;
  for (int64_t i = 0; i < shape_.heads * blocks * words; ++i) {
    chosen.push_back(i % 5 == 0 ? 0 : i % 7 == 0 ? ~0u : random());
  }
  ExpectNear(problem_.Run(engine_, {.pattern = TilePattern::kCsr,
                                    .tile = shape_.tile,
                                    .row_offsets = csr.row_offsets.data(),
                                    .columns = csr.columns.data(),
                                    .choice = {chosen.data(), 2 * shape_.tile}}),
             problem_.Expected([&](int head, int64_t i, int64_t j) {
               const int64_t block = j / (2 * shape_.tile);
               return j <= i && csr.listed.contains({head, i / shape_.tile, j / shape_.tile}) &&
                      (chosen[(head * blocks + block) * words + i / 32] >> i % 32 & 1) != 0;
             }));
}

TEST_P(AttentionTest, EqualBitsOnAnyNumberOfThreads) {
  const TileSelection tiles{.pattern = TilePattern::kCausal, .tile = shape_.tile};
  Engine one(1), three(3);
  const Result a = problem_.Run(one, tiles), b = problem_.Run(three, tiles);
  EXPECT_EQ(a.out.data, b.out.data);
  EXPECT_EQ(a.lse, b.lse);
  EXPECT_EQ(a.dq.data, b.dq.data);
  EXPECT_EQ(a.dk.data, b.dk.data);
  EXPECT_EQ(a.dv.data, b.dv.data);
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionTest,
                         ::testing::Values(Shape{300, 4, 4, 64, 64}, Shape{300, 8, 2, 128, 128},
                                           Shape{333, 14, 2, 64, 128}, Shape{200, 14, 2, 128, 64},
                                           Shape{1, 4, 4, 64, 128}, Shape{128, 8, 2, 64, 128},
                                           Shape{65, 4, 4, 128, 64}, Shape{130, 2, 1, 20, 64}),
                         [](const auto& info) {
                           const Shape& s = info.param;
                           return "n" + std::to_string(s.tokens) + "h" + std::to_string(s.heads) +
                                  "kv" + std::to_string(s.kv_heads) + "d" + std::to_string(s.d) +
                                  "t" + std::to_string(s.tile);
                         });

class InstructionSetTest : public ::testing::TestWithParam<const char*> {};

TEST_P(InstructionSetTest, Causal) {
  const TileMath* math = FindTileMath(GetParam());
  if (math == nullptr) GTEST_SKIP() << "this processor lacks " << GetParam();
  Engine engine(2, *math);
  const Problem problem(203, 4, 2, 64, 5);
  ExpectNear(problem.Run(engine, {.pattern = TilePattern::kCausal, .tile = 64}),
             problem.Expected([](int, int64_t i, int64_t j) { return j <= i; }));
}
INSTANTIATE_TEST_SUITE_P(All, InstructionSetTest, ::testing::Values("generic", "avx2", "avx512"),
                         [](const auto& info) { return std::string(info.param); });

// Forward and backward over the owners of a sequence, one call each, as a ring does it.
class ShardsTest : public ::testing::TestWithParam<std::tuple<LayoutKind, int>> {};

TEST_P(ShardsTest, SumOfOwnersEqualsOneCall) {
  const auto [kind, ranks] = GetParam();
  const Problem whole(1024, 4, 2, 64, 6);
  const std::vector<uint64_t> diagonals = {0b1011001, 0b1, 0b1111111111111111, 0b1000000000000001};
  const TileSelection tiles{.pattern = TilePattern::kToeplitz,
                            .tile = 64,
                            .diagonals = diagonals.data(),
                            .diagonal_words = 1};
  Engine engine(2);
  ExpectNear(whole.RunRing(engine, tiles, nullptr,
                           {.kind = kind, .ranks = ranks, .stripe = 128, .tokens = whole.q.tokens}),
             whole.Run(engine, tiles));
}
INSTANTIATE_TEST_SUITE_P(Layouts, ShardsTest,
                         ::testing::Combine(::testing::Values(LayoutKind::kContiguous,
                                                              LayoutKind::kZigzag,
                                                              LayoutKind::kStriped),
                                            ::testing::Values(1, 2, 4)));

TEST(NotANumberTest, ReachesTheOutputAndOnlyItsQueries) {
  for (const char* name : {"generic", "avx2", "avx512"}) {
    const TileMath* math = FindTileMath(name);
    if (math == nullptr) continue;
    Engine engine(1, *math);
    Problem problem(130, 2, 2, 64, 8);
    problem.q.at(70, 1, 3) = std::numeric_limits<float>::quiet_NaN();
    const Result result = problem.Run(engine, {.pattern = TilePattern::kCausal, .tile = 64});
    EXPECT_TRUE(std::isnan(result.out.at(70, 1, 0))) << name;
    EXPECT_FALSE(std::isnan(result.out.at(70, 0, 0))) << name;
    EXPECT_FALSE(std::isnan(result.out.at(71, 1, 0))) << name;
  }
}

TEST(ArgumentsTest, ErrorsNameTheArgument) {
  Engine engine(1);
  const Tensor q(256, 4, 64), k(256, 3, 64);
  Tensor out(256, 4, 64);
  std::vector<float> lse(1024);
  AttentionForwardArgs<float> args{.q = q.view(),
                                   .k = k.view(),
                                   .v = k.view(),
                                   .out = out.view(),
                                   .lse = lse.data(),
                                   .query_layout = {.tokens = 256},
                                   .key_layout = {.tokens = 256},
                                   .tiles = {.pattern = TilePattern::kCausal, .tile = 128},
                                   .scale = 0.125f};
  const auto message = [&] { return std::string(AttentionForward(engine, args).message()); };
  EXPECT_NE(message().find("kv_heads"), std::string::npos) << message();
  args.k = args.v = args.q;
  args.tiles.tile = 256;
  EXPECT_NE(message().find("tile"), std::string::npos) << message();
  args.tiles = {.pattern = TilePattern::kToeplitz, .tile = 64};
  EXPECT_NE(message().find("diagonals"), std::string::npos) << message();
  args.tiles = {.pattern = TilePattern::kWindow, .tile = 64};
  EXPECT_NE(message().find("window"), std::string::npos) << message();
  args.tiles = {.pattern = static_cast<TilePattern>(77), .tile = 64};
  EXPECT_NE(message().find("tiles.pattern is 77"), std::string::npos) << message();
  args.tiles = {.pattern = TilePattern::kCausal, .tile = 64};
  args.query_layout =
      args.key_layout = {.kind = LayoutKind::kStriped, .ranks = 2, .stripe = 96, .tokens = 512};
  EXPECT_NE(message().find("96"), std::string::npos) << message();
}

TEST(AttentionErrors, RoundedGradientsAreForBf16) {
  Engine engine(1);
  const Tensor q(128, 2, 64);
  Tensor dq(128, 2, 64), dk(dq), dv(dq), rounded(dq);
  const std::vector<float> rows(256, 0.0f);
  AttentionBackwardArgs<float> args{.q = q.view(),
                                    .k = q.view(),
                                    .v = q.view(),
                                    .d_out = q.view(),
                                    .lse = rows.data(),
                                    .delta = rows.data(),
                                    .dq = dq.view(),
                                    .dk = dk.view(),
                                    .dv = dv.view(),
                                    .query_layout = {.tokens = 128},
                                    .key_layout = {.tokens = 128},
                                    .tiles = {.pattern = TilePattern::kCausal, .tile = 64},
                                    .scale = 0.125f,
                                    .deterministic = true};
  EXPECT_EQ(AttentionBackward(engine, args), absl::OkStatus());
  args.rounded_dk = rounded.view();
  const std::string message(AttentionBackward(engine, args).message());
  EXPECT_NE(message.find("rounded_dk"), std::string::npos) << message;
}

}  // namespace
}  // namespace ringleader::kernels::reference
