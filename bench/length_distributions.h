// Lengths of samples as three data sets of long documents have them, drawn with a fixed seed: what
// figures of balance are measured on. docs/balance.md describes them.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>

namespace ringleader::bench {

// The same numbers with every standard library.
class LengthRandom {
 public:
  explicit LengthRandom(uint64_t seed) : engine_(seed) {}
  double Unit() { return static_cast<double>(engine_() >> 11) * 0x1.0p-53; }  // [0, 1)
  // Even over the logarithms of [low, high).
  uint64_t Between(double low, double high) {
    return static_cast<uint64_t>(low * std::pow(high / low, Unit()));
  }

 private:
  std::mt19937_64 engine_;
};

// 8K to 72K tokens, half of the samples between 8K and 16K.
inline uint64_t LongAlignLike(LengthRandom& random) {
  return random.Unit() < 0.5 ? random.Between(8192, 16384) : random.Between(16384, 73728);
}

// Below 4K or above 16K, up to 64K, as many of each.
inline uint64_t ChatQa2Like(LengthRandom& random) {
  return random.Unit() < 0.5 ? random.Between(512, 4096) : random.Between(16384, 65536);
}

// Mostly short, up to 64K; 40 % of the tokens are in documents of 64K to 256K.
inline uint64_t ProLongLike(LengthRandom& random) {
  return random.Unit() < 0.055 ? random.Between(65536, 262144) : random.Between(1024, 65536);
}

struct LengthDistribution {
  const char* name;
  uint64_t (*draw)(LengthRandom& random);
};
inline constexpr LengthDistribution kLengthDistributions[] = {{"LongAlign-like", LongAlignLike},
                                                              {"ChatQA2-like", ChatQa2Like},
                                                              {"ProLong-like", ProLongLike}};

}  // namespace ringleader::bench
