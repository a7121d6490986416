// Selected columns beside tiles against the CPU engine.
#include "kernels/sm90/columns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/reference/attention/columns.h"
#include "kernels/sm90/testing/device_problem.h"
#include "kernels/sm90/testing/unread.h"

namespace ringleader::kernels::sm90 {
namespace {

constexpr int kMaxColumns = 300;

// Columns of a case, on the host and the device; head 1 has none.
struct Columns {
  std::vector<int64_t> positions;
  std::vector<int32_t> counts;
  DeviceBuffer<int64_t> gpu_positions;
  DeviceBuffer<int32_t> gpu_counts;
  ColumnSelection host, gpu;

  explicit Columns(const Case& c) {
    for (int h = 0; h < c.heads; ++h) {
      counts.push_back(h == 1 ? 0 : std::uniform_int_distribution<int>(1, kMaxColumns)(Random()));
      std::vector<int64_t> all(c.tokens);
      for (int64_t i = 0; i < c.tokens; ++i) all[i] = i;
      std::shuffle(all.begin(), all.end(), Random());
      std::sort(all.begin(), all.begin() + counts[h]);
      for (int i = 0; i < kMaxColumns; ++i) {
        positions.push_back(i < counts[h] ? all[i] : std::numeric_limits<int64_t>::max());
      }
    }
    gpu_positions = DeviceBuffer<int64_t>(positions);
    gpu_counts = DeviceBuffer<int32_t>(counts);
    host = {positions.data(), counts.data(), kMaxColumns};
    gpu = {gpu_positions.data(), gpu_counts.data(), kMaxColumns};
  }
};

// Tiles and columns of a case on the device.
class ColumnTest : public AttentionTest {
 protected:
  void SetUp() override {
    AttentionTest::SetUp();
    if (IsSkipped()) return;
    const Case& c = GetParam();
    lists_ = std::make_unique<Lists>(c);
    columns_ = std::make_unique<Columns>(c);
    problem_ = std::make_unique<Problem>(c);
    const int64_t elements = int64_t{c.heads} * kMaxColumns * c.head_dim;
    keys_ = DeviceBuffer<__nv_bfloat16>(elements);
    values_ = DeviceBuffer<__nv_bfloat16>(elements);
    d_keys_ = DeviceBuffer<float>(elements);
    d_values_ = DeviceBuffer<float>(elements);
  }

  void Forward() const {
    for (const KeyShard& owner : problem_->keys) {
      ASSERT_EQ(
          GatherColumns(View<const __nv_bfloat16>(owner.gpu_k, owner.k),
                        View<const __nv_bfloat16>(owner.gpu_v, owner.k), owner.layout,
                        columns_->gpu, GetParam().heads, keys_.data(), values_.data(), nullptr),
          absl::OkStatus());
    }
    for (const QueryShard& rank : problem_->queries) {
      for (const KeyShard& owner : problem_->keys) {
        ASSERT_NO_FATAL_FAILURE(problem_->Forward(rank, owner, TilesOf(rank, owner.layout.rank)));
      }
      ASSERT_EQ(ColumnForward({.q = View<const __nv_bfloat16>(rank.gpu_q, rank.q),
                               .keys = keys_.data(),
                               .values = values_.data(),
                               .columns = columns_->gpu,
                               .tiles = TilesOf(rank, rank.layout.rank),
                               .query_layout = rank.layout,
                               .out = View<float>(rank.out, rank.q),
                               .lse = rank.lse.data(),
                               .scale = problem_->scale},
                              problem_->scratch(), nullptr),
                absl::OkStatus());
      problem_->ComputeDelta(rank);
    }
  }

  void Backward(bool deterministic) {
    d_keys_.Zero();
    d_values_.Zero();
    ASSERT_NO_FATAL_FAILURE(problem_->BackwardRing(*lists_, deterministic));
    for (const QueryShard& rank : problem_->queries) {
      const ColumnBackwardArgs args = {.q = View<const __nv_bfloat16>(rank.gpu_q, rank.q),
                                       .d_out = View<const __nv_bfloat16>(rank.gpu_d_out, rank.q),
                                       .keys = keys_.data(),
                                       .values = values_.data(),
                                       .columns = columns_->gpu,
                                       .tiles = TilesOf(rank, rank.layout.rank),
                                       .query_layout = rank.layout,
                                       .lse = rank.lse.data(),
                                       .delta = rank.delta.data(),
                                       .dq = View<float>(rank.dq, rank.q),
                                       .d_keys = d_keys_.data(),
                                       .d_values = d_values_.data(),
                                       .scale = problem_->scale,
                                       .deterministic = deterministic};
      ASSERT_EQ(ColumnBackward(args, problem_->scratch(), nullptr), absl::OkStatus());
    }
  }

  void Scatter() const {
    for (const KeyShard& owner : problem_->keys) {
      ASSERT_EQ(ScatterColumns(d_keys_.data(), d_values_.data(), owner.layout, columns_->gpu,
                               GetParam().heads, View<float>(owner.dk, owner.k),
                               View<float>(owner.dv, owner.k), nullptr),
                absl::OkStatus());
    }
  }

  TileSelection TilesOf(const QueryShard& rank, int owner) const {
    return lists_->Of(rank.layout.rank, owner);
  }
  Result Expected() const;

  std::unique_ptr<Lists> lists_;
  std::unique_ptr<Columns> columns_;
  std::unique_ptr<Problem> problem_;
  DeviceBuffer<__nv_bfloat16> keys_, values_;  // [heads, kMaxColumns, d]
  DeviceBuffer<float> d_keys_, d_values_;
};

// The same on the CPU, on one rank.
Result ColumnTest::Expected() const {
  static reference::Engine& engine = *new reference::Engine(4);
  const Problem& p = *problem_;
  const int heads = GetParam().heads;
  const ShardLayout whole = {.tokens = GetParam().tokens};
  std::vector<float> keys(d_keys_.size(), 0.0f), values(keys), d_keys(keys), d_values(keys);
  reference::GatherColumns(p.k.view(), p.v.view(), whole, columns_->host, heads, keys.data(),
                           values.data());
  Result expected(p.q, p.k);
  EXPECT_EQ(reference::AttentionForward(engine, {.q = p.q.view(),
                                                 .k = p.k.view(),
                                                 .v = p.v.view(),
                                                 .out = expected.out.view(),
                                                 .lse = expected.lse.data(),
                                                 .query_layout = whole,
                                                 .key_layout = whole,
                                                 .tiles = lists_->host,
                                                 .scale = p.scale}),
            absl::OkStatus());
  EXPECT_EQ(reference::ColumnForward(engine, {.q = p.q.view(),
                                              .keys = keys.data(),
                                              .values = values.data(),
                                              .columns = columns_->host,
                                              .tiles = lists_->host,
                                              .query_layout = whole,
                                              .out = expected.out.view(),
                                              .lse = expected.lse.data(),
                                              .scale = p.scale}),
            absl::OkStatus());
  std::vector<float> delta(expected.lse.size());
  reference::AttentionDelta(engine, p.d_out.view(), std::as_const(expected.out).view(),
                            delta.data());
  EXPECT_EQ(reference::AttentionBackward(engine, {.q = p.q.view(),
                                                  .k = p.k.view(),
                                                  .v = p.v.view(),
                                                  .d_out = p.d_out.view(),
                                                  .lse = expected.lse.data(),
                                                  .delta = delta.data(),
                                                  .dq = expected.dq.view(),
                                                  .dk = expected.dk.view(),
                                                  .dv = expected.dv.view(),
                                                  .query_layout = whole,
                                                  .key_layout = whole,
                                                  .tiles = lists_->host,
                                                  .scale = p.scale}),
            absl::OkStatus());
  EXPECT_EQ(reference::ColumnBackward(engine, {.q = p.q.view(),
                                               .d_out = p.d_out.view(),
                                               .keys = keys.data(),
                                               .values = values.data(),
                                               .columns = columns_->host,
                                               .tiles = lists_->host,
                                               .query_layout = whole,
                                               .lse = expected.lse.data(),
                                               .delta = delta.data(),
                                               .dq = expected.dq.view(),
                                               .d_keys = d_keys.data(),
                                               .d_values = d_values.data(),
                                               .scale = p.scale}),
            absl::OkStatus());
  reference::ScatterColumns(d_keys.data(), d_values.data(), whole, columns_->host, heads,
                            expected.dk.view(), expected.dv.view());
  return expected;
}

TEST_P(ColumnTest, TilesAndColumnsTogetherEqualCpuEngine) {
  ASSERT_NO_FATAL_FAILURE(Forward());
  const Result expected = Expected();
  for (const bool deterministic : {false, true}) {
    SCOPED_TRACE(deterministic ? "deterministic" : "default");
    ASSERT_NO_FATAL_FAILURE(Backward(deterministic));
    ASSERT_NO_FATAL_FAILURE(Scatter());
    ExpectClose(problem_->Collect(), expected);
  }
}

TEST_P(ColumnTest, DeterministicHasSameBitsIn20Runs) {
  ASSERT_NO_FATAL_FAILURE(Forward());
  std::vector<std::vector<float>> first;
  for (int run = 0; run < (SmallShapes() ? 2 : 20); ++run) {
    ASSERT_NO_FATAL_FAILURE(Backward(/*deterministic=*/true));
    ASSERT_NO_FATAL_FAILURE(Scatter());
    std::vector<std::vector<float>> gradients = problem_->Gradients();
    gradients.push_back(d_keys_.Read());
    gradients.push_back(d_values_.Read());
    ASSERT_NO_FATAL_FAILURE(AssertSameBits(std::move(gradients), run, first));
  }
}

// Into bf16 a position's sum over heads is rounded once.
TEST_P(ColumnTest, ScattersIntoBf16) {
  ASSERT_NO_FATAL_FAILURE(Forward());
  ASSERT_NO_FATAL_FAILURE(Backward(/*deterministic=*/true));
  problem_->ZeroGradients();
  ASSERT_NO_FATAL_FAILURE(Scatter());
  for (const KeyShard& owner : problem_->keys) {
    const Tensor before = RandomBf16(owner.k.tokens, owner.k.heads, owner.k.head_dim);
    const DeviceBuffer<__nv_bfloat16> dk = ToBf16(before), dv = ToBf16(before);
    ASSERT_EQ(ScatterColumns(d_keys_.data(), d_values_.data(), owner.layout, columns_->gpu,
                             GetParam().heads, View<__nv_bfloat16>(dk, owner.k),
                             View<__nv_bfloat16>(dv, owner.k), nullptr),
              absl::OkStatus());
    const auto check = [&](const char* name, const DeviceBuffer<__nv_bfloat16>& actual,
                           const DeviceBuffer<float>& sums) {
      const std::vector<__nv_bfloat16> values = actual.Read();
      const std::vector<float> terms = sums.Read();
      for (size_t i = 0; i < terms.size(); ++i) {
        const float expected = __bfloat162float(__float2bfloat16_rn(before.data[i] + terms[i]));
        ASSERT_EQ(__bfloat162float(values[i]), expected) << name << ", element " << i;
      }
    };
    check("dk", dk, owner.dk);
    check("dv", dv, owner.dv);
  }
}

std::vector<Case> ColumnCases() {
  std::vector<Case> cases;
  for (const int head_dim : {64, 128}) {
    for (const int tile : {64, 128}) {
      for (const int ranks : {1, 2}) {
        if (SmallShapes() && ranks > 1) continue;
        for (const bool documents : {false, true}) {
          cases.push_back({.name = absl::StrFormat("D%dTile%dRanks%d%s", head_dim, tile, ranks,
                                                   documents ? "Documents" : ""),
                           .tokens = SmallShapes() ? 512 : 2048,
                           .head_dim = head_dim,
                           .tile = tile,
                           .pattern = TilePattern::kToeplitz,
                           .layout = LayoutKind::kStriped,
                           .ranks = ranks,
                           .stripe = tile,
                           .documents = documents});
        }
      }
    }
  }
  return cases;
}

// Columns and diagonals are one pattern: what a list of tiles covers is not looked up.
TEST(ColumnArgumentTest, NamesOtherPatterns) {
  ColumnForwardArgs args;
  auto* const data = Unread<__nv_bfloat16>();
  args.q = {data, 256, 4, 128, 512, 128};
  args.query_layout.tokens = 256;
  args.scale = 1;
  for (const TilePattern pattern :
       {TilePattern::kFull, TilePattern::kCausal, TilePattern::kWindow, TilePattern::kCsr}) {
    args.tiles.pattern = pattern;
    const absl::Status status = ColumnForward(args, {}, nullptr);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("tiles.pattern"));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ColumnTest, ::testing::ValuesIn(ColumnCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ringleader::kernels::sm90
