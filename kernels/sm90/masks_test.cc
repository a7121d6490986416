// Hopper attention under every mask of kernels/masks/, against the fp64 oracle of the masks'
// slices, which are written from the definitions by themselves: alone and beside lists of tiles.
#include "kernels/masks/masks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/masks/testing/slices.h"
#include "kernels/sm90/testing/device_problem.h"

namespace ringleader::kernels::sm90 {
namespace {

using reference::testing::ComputeMaskedAttention;
using reference::testing::MaskedAttention;
using reference::testing::Visible;

// Tokens, head_dim, tile, query heads for a KV head.
using Shape = std::tuple<int32_t, int, int, int>;

class MasksTest : public ::testing::TestWithParam<std::tuple<MaskKind, Shape>> {
 protected:
  void SetUp() override {
    if (!HaveGpu()) GTEST_SKIP() << "no GPU";
  }
};

std::vector<float> ToFloat(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

Result RunOn(const Problem& p, const TileSelection& tiles) {
  p.Forward(p.queries[0], p.keys[0], tiles);
  p.ComputeDelta(p.queries[0]);
  p.Backward(p.queries[0], p.keys[0], tiles);
  return p.Collect();
}

Result Expected(const Problem& p, const Visible& visible) {
  const MaskedAttention oracle = ComputeMaskedAttention(p.q, p.k, p.v, p.d_out, p.scale, visible);
  Result expected(p.q, p.k);
  expected.out.data = ToFloat(oracle.out);
  expected.dq.data = ToFloat(oracle.dq);
  expected.dk.data = ToFloat(oracle.dk);
  expected.dv.data = ToFloat(oracle.dv);
  expected.lse = ToFloat(oracle.lse);
  return expected;
}

TEST_P(MasksTest, EqualTheirSlices) {
  const Shape& shape = std::get<Shape>(GetParam());
  const auto tokens = std::get<0>(shape);
  const int tile = std::get<2>(shape);
  const Case c = {.name = {},
                  .tokens = tokens,
                  .heads = 2 * std::get<3>(shape),
                  .kv_heads = 2,
                  .head_dim = std::get<1>(shape),
                  .tile = tile,
                  .pattern = TilePattern::kFull};
  // A document of one token, one that ends with a tile, some of any length.
  std::vector<int32_t> firsts = {0, 1};
  for (const int32_t first : {40, 128, 200, 333, 517}) {
    if (first < tokens) firsts.push_back(first);
  }
  const Mask mask = {
      .kind = std::get<MaskKind>(GetParam()), .window = 90, .prefix = 75, .block = 50};
  const std::vector<KeyIntervals> rows = *kernels::IntervalsOf(mask, tokens, firsts);
  const DeviceBuffer<KeyIntervals> gpu_rows(rows);
  const std::vector<testing::Slice> slices = testing::SlicesOf(mask, tokens, firsts);
  const std::vector<int> shown = testing::CountPairs(slices, tokens);
  int64_t area = 0, pairs = 0;
  for (const testing::Slice& slice : slices) area += slice.Area();
  for (const KeyIntervals& row : rows) {
    pairs += row.end - row.begin + row.second_end - row.second_begin;
  }
  ASSERT_EQ(pairs, area);
  const auto is_shown = [&](int64_t i, int64_t j) { return shown[i * tokens + j] == 1; };
  {
    SCOPED_TRACE("alone");
    const Problem p(c);
    const Result actual =
        RunOn(p, {.pattern = TilePattern::kFull, .tile = tile, .intervals = gpu_rows.data()});
    ExpectClose(actual, Expected(p, [&](int, int64_t i, int64_t j) { return is_shown(i, j); }));
  }
  SCOPED_TRACE("beside lists");
  const int64_t blocks = (tokens + tile - 1) / tile;
  std::vector<char> listed(c.heads * blocks * blocks);
  for (size_t i = 0; i < listed.size(); ++i) {
    listed[i] = i / blocks % blocks % 4 != 2 && Random()() % 2 == 0;  // some rows have none
  }
  const auto is_listed = [&](int64_t head, int64_t a, int64_t b) {
    return listed[(head * blocks + a) * blocks + b] != 0;
  };
  const TileLists lists(c.heads, blocks, is_listed);
  TileSelection on_host,
      tiles = {.pattern = TilePattern::kCsr, .tile = tile, .intervals = gpu_rows.data()};
  lists.PointFrom(on_host, tiles);
  const Problem p(c);
  ExpectClose(RunOn(p, tiles), Expected(p, [&](int head, int64_t i, int64_t j) {
                return is_shown(i, j) && is_listed(head, i / tile, j / tile);
              }));
}

std::vector<MaskKind> AllKinds() {
  std::vector<MaskKind> kinds(kMaskKinds);
  for (int kind = 0; kind < kMaskKinds; ++kind) kinds[kind] = static_cast<MaskKind>(kind);
  return kinds;
}
std::string NameOf(const ::testing::TestParamInfo<MasksTest::ParamType>& info) {
  const auto& [kind, shape] = info.param;
  const auto& [tokens, head_dim, tile, group] = shape;
  return absl::StrFormat("%s_n%d_d%d_tile%d_gqa%d", MaskName(kind), tokens, head_dim, tile, group);
}
INSTANTIATE_TEST_SUITE_P(
    Kinds, MasksTest,
    ::testing::Combine(::testing::ValuesIn(AllKinds()),
                       ::testing::Values(Shape{451, 64, 64, 2}, Shape{640, 128, 128, 3},
                                         Shape{333, 128, 64, 1}, Shape{200, 64, 128, 8})),
    NameOf);

}  // namespace
}  // namespace ringleader::kernels::sm90
