#include "kernels/fused/rows/attention_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace ringleader::kernels::fused
