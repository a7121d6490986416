// Selected columns beside tiles against the CPU engine.
#include "kernels/sm90/columns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/reference/columns.h"
#include "kernels/sm90/testing/attention_problem.h"

namespace ringleader::kernels::sm90 {
namespace {

using ColumnTest = AttentionTest;

TEST_P(ColumnTest, TilesAndColumnsTogetherEqualCpuEngine) {
  const Case& c = GetParam();
  const Problem p(c);
  const Lists lists(c);
  constexpr int kMaxColumns = 300;
  std::vector<int64_t> positions;
  std::vector<int32_t> counts;
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
  const DeviceBuffer<int64_t> gpu_positions(positions);
  const DeviceBuffer<int32_t> gpu_counts(counts);
  const ColumnSelection host = {positions.data(), counts.data(), kMaxColumns};
  const ColumnSelection gpu = {gpu_positions.data(), gpu_counts.data(), kMaxColumns};
  const int64_t floats = int64_t{c.heads} * kMaxColumns * c.head_dim;

  const DeviceBuffer<__nv_bfloat16> keys(floats), values(floats);
  for (const KeyShard& owner : p.keys) {
    ASSERT_EQ(GatherColumns(View<const __nv_bfloat16>(owner.gpu_k, owner.k),
                            View<const __nv_bfloat16>(owner.gpu_v, owner.k), owner.layout, gpu,
                            c.heads, keys.data(), values.data(), nullptr),
              absl::OkStatus());
  }
  const DeviceBuffer<float> d_keys(std::vector<float>(floats, 0.0f));
  const DeviceBuffer<float> d_values(std::vector<float>(floats, 0.0f));
  const auto backward_args = [&](const QueryShard& rank) {
    return ColumnBackwardArgs{.q = View<const __nv_bfloat16>(rank.gpu_q, rank.q),
                              .d_out = View<const __nv_bfloat16>(rank.gpu_d_out, rank.q),
                              .keys = keys.data(),
                              .values = values.data(),
                              .columns = gpu,
                              .tiles = lists.gpu,
                              .query_layout = rank.layout,
                              .lse = rank.lse.data(),
                              .delta = rank.delta.data(),
                              .dq = View<float>(rank.dq, rank.q),
                              .d_keys = d_keys.data(),
                              .d_values = d_values.data(),
                              .scale = p.scale};
  };
  for (const QueryShard& rank : p.queries) {
    for (const KeyShard& owner : p.keys) ASSERT_NO_FATAL_FAILURE(p.Forward(rank, owner, lists.gpu));
    ASSERT_EQ(ColumnForward({.q = View<const __nv_bfloat16>(rank.gpu_q, rank.q),
                             .keys = keys.data(),
                             .values = values.data(),
                             .columns = gpu,
                             .tiles = lists.gpu,
                             .query_layout = rank.layout,
                             .out = View<float>(rank.out, rank.q),
                             .lse = rank.lse.data(),
                             .scale = p.scale},
                            p.scratch(), nullptr),
              absl::OkStatus());
    p.ComputeDelta(rank);
  }
  for (const QueryShard& rank : p.queries) {
    for (const KeyShard& owner : p.keys) {
      ASSERT_NO_FATAL_FAILURE(p.Backward(rank, owner, lists.gpu));
    }
    ASSERT_EQ(ColumnBackward(backward_args(rank), p.scratch(), nullptr), absl::OkStatus());
  }

  for (const KeyShard& owner : p.keys) {
    ASSERT_EQ(
        ScatterColumns(d_keys.data(), d_values.data(), owner.layout, gpu, c.heads,
                       View<float>(owner.dk, owner.k), View<float>(owner.dv, owner.k), nullptr),
        absl::OkStatus());
  }

  // The same on the CPU, on one rank.
  reference::Engine engine(4);
  const ShardLayout whole = {.tokens = c.tokens};
  std::vector<float> cpu_keys(floats, 0.0f), cpu_values(floats, 0.0f);
  reference::GatherColumns(p.k.view(), p.v.view(), whole, host, c.heads, cpu_keys.data(),
                           cpu_values.data());
  Result expected(p.q, p.k);
  ASSERT_EQ(reference::AttentionForward(engine, {.q = p.q.view(),
                                                 .k = p.k.view(),
                                                 .v = p.v.view(),
                                                 .out = expected.out.view(),
                                                 .lse = expected.lse.data(),
                                                 .query_layout = whole,
                                                 .key_layout = whole,
                                                 .tiles = lists.host,
                                                 .scale = p.scale}),
            absl::OkStatus());
  ASSERT_EQ(reference::ColumnForward(engine, {.q = p.q.view(),
                                              .keys = cpu_keys.data(),
                                              .values = cpu_values.data(),
                                              .columns = host,
                                              .tiles = lists.host,
                                              .query_layout = whole,
                                              .out = expected.out.view(),
                                              .lse = expected.lse.data(),
                                              .scale = p.scale}),
            absl::OkStatus());
  std::vector<float> delta(expected.lse.size());
  std::vector<float> cpu_d_keys(floats, 0.0f), cpu_d_values(floats, 0.0f);
  reference::AttentionDelta(engine, p.d_out.view(), std::as_const(expected.out).view(),
                            delta.data());
  ASSERT_EQ(reference::AttentionBackward(engine, {.q = p.q.view(),
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
                                                  .tiles = lists.host,
                                                  .scale = p.scale}),
            absl::OkStatus());
  ASSERT_EQ(reference::ColumnBackward(engine, {.q = p.q.view(),
                                               .d_out = p.d_out.view(),
                                               .keys = cpu_keys.data(),
                                               .values = cpu_values.data(),
                                               .columns = host,
                                               .tiles = lists.host,
                                               .query_layout = whole,
                                               .lse = expected.lse.data(),
                                               .delta = delta.data(),
                                               .dq = expected.dq.view(),
                                               .d_keys = cpu_d_keys.data(),
                                               .d_values = cpu_d_values.data(),
                                               .scale = p.scale}),
            absl::OkStatus());
  reference::ScatterColumns(cpu_d_keys.data(), cpu_d_values.data(), whole, host, c.heads,
                            expected.dk.view(), expected.dv.view());
  ExpectClose(p.Collect(), expected);
}

std::vector<Case> ColumnCases() {
  std::vector<Case> cases;
  for (const int head_dim : {64, 128}) {
    for (const int tile : {64, 128}) {
      for (const int ranks : {1, 2}) {
        cases.push_back({.name = absl::StrFormat("D%dTile%dRanks%d", head_dim, tile, ranks),
                         .tokens = 2048,
                         .head_dim = head_dim,
                         .tile = tile,
                         .pattern = TilePattern::kToeplitz,
                         .layout = LayoutKind::kStriped,
                         .ranks = ranks,
                         .stripe = tile});
      }
    }
  }
  return cases;
}

// Columns and diagonals are one pattern: what a list of tiles covers is not looked up.
TEST(ColumnArgumentTest, NamesOtherPatterns) {
  ColumnForwardArgs args;
  auto* const data = reinterpret_cast<__nv_bfloat16*>(uintptr_t{256});
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
