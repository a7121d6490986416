#include "kernels/fused/rows/attention_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"

namespace ringleader::kernels::fused {
namespace {

using Bf16 = __nv_bfloat16;
using ::testing::HasSubstr;

using AttentionRowsTest = GpuTest;

// Units of 64 rows, the last one cut short; what does not travel is zero where it is spread out,
// and left as it is where it is added to.
TEST_F(AttentionRowsTest, PackedRowsAreThoseOfTheirPlaces) {
  constexpr int64_t kRows = 300, kRow = 3 * 64, kPacked = 64 + 44;
  const std::vector<int32_t> places = {-1, 0, -1, -1, 64};
  const DeviceBuffer<int32_t> gpu_places(places);
  const PackedRows rows = {
      .places = gpu_places.data(), .rows = kRows, .packed = kPacked, .row = kRow};
  const auto packed_at = [&](int64_t i) -> int64_t {  // -1: it does not travel
    const int64_t part = i / (kRows * kRow), row = i / kRow % kRows;
    const int64_t place = places[row / kPackedUnit];
    if (place < 0) return -1;
    return (part * kPacked + place + row % kPackedUnit) * kRow + i % kRow;
  };
  const auto floats = NormalFloat(2 * kRows * kRow), before = NormalFloat(2 * kRows * kRow);
  const auto keys = Normal(2 * kRows * kRow);
  const DeviceBuffer<float> gpu_floats(floats);
  const DeviceBuffer<Bf16> gpu_keys(keys);
  DeviceBuffer<float> packed_floats(rows.elements()), sum(before), rounded_sum(before);
  DeviceBuffer<Bf16> packed_keys(rows.elements()), rounded(rows.elements()),
      spread(gpu_keys.size());
  ASSERT_EQ(GatherRows(rows, gpu_floats.data(), packed_floats.data(), nullptr), absl::OkStatus());
  ASSERT_EQ(GatherRows(rows, gpu_floats.data(), rounded.data(), nullptr), absl::OkStatus());
  ASSERT_EQ(GatherRows(rows, gpu_keys.data(), packed_keys.data(), nullptr), absl::OkStatus());
  ASSERT_EQ(SpreadRows(rows, packed_keys.data(), spread.data(), nullptr), absl::OkStatus());
  ASSERT_EQ(AddRows(rows, packed_floats.data(), sum.data(), nullptr), absl::OkStatus());
  ASSERT_EQ(AddRows(rows, rounded.data(), rounded_sum.data(), nullptr), absl::OkStatus());
  const auto got_floats = packed_floats.Read(), got_sum = sum.Read(),
             got_rounded_sum = rounded_sum.Read();
  const auto got_keys = packed_keys.Read(), got_rounded = rounded.Read(),
             got_spread = spread.Read();
  for (int64_t i = 0; i < 2 * kRows * kRow; ++i) {
    const int64_t at = packed_at(i);
    const float key = __bfloat162float(keys[i]);
    ASSERT_EQ(__bfloat162float(got_spread[i]), at < 0 ? 0.0f : key) << i;
    const float added = at < 0 ? 0.0f : floats[i],
                added_rounded = at < 0 ? 0.0f : __bfloat162float(__float2bfloat16_rn(floats[i]));
    ASSERT_EQ(got_sum[i], before[i] + added) << i;
    ASSERT_EQ(got_rounded_sum[i], before[i] + added_rounded) << i;
    if (at < 0) continue;
    ASSERT_EQ(got_floats[at], floats[i]) << i;
    ASSERT_EQ(__bfloat162float(got_keys[at]), key) << i;
    ASSERT_EQ(__bfloat162float(got_rounded[at]), added_rounded) << i;
  }
  EXPECT_THAT(std::string(GatherRows({}, gpu_keys.data(), packed_keys.data(), nullptr).message()),
              HasSubstr("places"));
}

// Bit for bit what a pass over the output casts, on heads that lie apart and a block's threads that
// have less and more than a vector each.
TEST_F(AttentionRowsTest, TheOutputIsCastAsItIsStored) {
  struct Shape {
    int64_t tokens;
    int32_t heads, head_dim;
  };
  for (const Shape& shape : {Shape{70, 16, 128}, {3, 32, 128}, {129, 3, 64}, {5, 129, 128}}) {
    const int64_t dim = int64_t{shape.heads} * shape.head_dim, stride = dim + 8;
    std::vector<float> sums = NormalFloat(shape.tokens * stride);
    std::vector<float> lse(shape.tokens * shape.heads, 0.5f);
    for (int32_t head = 0; head < shape.heads; ++head) lse[head * shape.tokens + 1] = -INFINITY;
    lse[shape.tokens + 2] = -INFINITY;  // of one head
    sums[stride + 3] = NAN;             // nobody reads it
    sums[2 * stride] = NAN;
    for (int64_t i = 0; i < dim; ++i) sums[i] *= 1e-20f;
    const DeviceBuffer<float> gpu_sums(sums), gpu_lse(lse);
    const TokenMajor<const float> view = {gpu_sums.data(), shape.tokens, shape.heads,
                                          shape.head_dim,  stride,       shape.head_dim};
    DeviceBuffer<Bf16> plain(shape.tokens * dim), out(shape.tokens * dim);
    DeviceBuffer<uint8_t> codes(shape.tokens * dim), expected_codes(shape.tokens * dim);
    DeviceBuffer<float> scales(shape.tokens), expected_scales(shape.tokens);
    ASSERT_EQ(FinishOutput(view, gpu_lse.data(), plain.data(), {}, nullptr), absl::OkStatus());
    ASSERT_EQ(
        FinishOutput(view, gpu_lse.data(), out.data(), {codes.data(), scales.data()}, nullptr),
        absl::OkStatus());
    ASSERT_EQ(CastRows({.x = plain.data(),
                        .cast = {expected_codes.data(), expected_scales.data()},
                        .stride = dim,
                        .rows = shape.tokens,
                        .dim = dim},
                       nullptr),
              absl::OkStatus());
    const auto bits = [](const auto& values) {
      const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
      return std::vector<uint8_t>(bytes, bytes + values.size() * sizeof(values[0]));
    };
    EXPECT_EQ(bits(out.Read()), bits(plain.Read())) << shape.heads << " heads";
    EXPECT_EQ(codes.Read(), expected_codes.Read()) << shape.heads << " heads";
    EXPECT_EQ(bits(scales.Read()), bits(expected_scales.Read())) << shape.heads << " heads";
    EXPECT_TRUE(std::isnan(scales.Read()[2])) << "a row that is no numbers";
    EXPECT_FALSE(std::isnan(scales.Read()[1])) << "a row that attended to nothing";
  }
}

}  // namespace
}  // namespace ringleader::kernels::fused
