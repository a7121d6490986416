// Whole numbers, rounded up.
#pragma once

#include <concepts>
#include <type_traits>

namespace ringleader {

// Returns `value` / `divisor`, rounded up; the divisor is above 0. Nothing overflows on the way.
template <std::integral Value, std::integral Divisor>
constexpr std::common_type_t<Value, Divisor> CeilDiv(Value value, Divisor divisor) {
  static_assert(std::is_signed_v<Value> == std::is_signed_v<Divisor>);
  return value / divisor + (value % divisor > 0 ? 1 : 0);
}

// Returns `value`, or where it is no multiple of `multiple` the next one; `multiple` is above 0.
template <std::integral Value, std::integral Multiple>
constexpr std::common_type_t<Value, Multiple> RoundUp(Value value, Multiple multiple) {
  return CeilDiv(value, multiple) * multiple;
}

}  // namespace ringleader
