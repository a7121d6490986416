// Numbers that are the same on all machines and with every standard library.
#pragma once

#include <cstdint>

namespace ringleader {

// What the state of a SplitMix64 generator (Steele et al. 2014) grows by from draw to draw.
inline constexpr uint64_t kSplitMixStep = 0x9e3779b97f4a7c15u;

// The draw of state `x`: neighbours in, noise out.
constexpr uint64_t SplitMix64(uint64_t x) {
  x += kSplitMixStep;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace ringleader
