#include "base/numbers/ceil_div.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <type_traits>

namespace ringleader {
namespace {

TEST(CeilDivTest, RoundsUp) {
  EXPECT_EQ(CeilDiv(0, 4), 0);
  EXPECT_EQ(CeilDiv(1, 4), 1);
  EXPECT_EQ(CeilDiv(4, 4), 1);
  EXPECT_EQ(CeilDiv(5, 4), 2);
  EXPECT_EQ(CeilDiv(7, 1), 7);
}

TEST(CeilDivTest, NegativeNumbersAreRoundedUpToo) {
  EXPECT_EQ(CeilDiv(-1, 4), 0);
  EXPECT_EQ(CeilDiv(-4, 4), -1);
  EXPECT_EQ(CeilDiv(-5, 4), -1);
  EXPECT_EQ(CeilDiv(-8, 1), -8);
}

TEST(CeilDivTest, TheLargestNumbersDoNotOverflow) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  static_assert(CeilDiv(kMost, 2) == kMost / 2 + 1);
  static_assert(CeilDiv(kMost, kMost) == 1);
  static_assert(CeilDiv(std::numeric_limits<uint32_t>::max(), 2u) == uint32_t{1} << 31);
}

TEST(CeilDivTest, TheResultIsOfTheWiderType) {
  static_assert(std::is_same_v<decltype(CeilDiv(int64_t{1}, int{1})), int64_t>);
  static_assert(std::is_same_v<decltype(RoundUp(int{1}, int64_t{1})), int64_t>);
  EXPECT_EQ(RoundUp(3, int64_t{1} << 40), int64_t{1} << 40);
}

TEST(RoundUpTest, ToTheNextMultiple) {
  EXPECT_EQ(RoundUp(0, 16), 0);
  EXPECT_EQ(RoundUp(1, 16), 16);
  EXPECT_EQ(RoundUp(16, 16), 16);
  EXPECT_EQ(RoundUp(17, 16), 32);
}

}  // namespace
}  // namespace ringleader
