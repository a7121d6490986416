// What share of their tiles micro-batches of different lengths visited: a moving average over
// steps.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace ringleader::balance {

class LengthDensities {
 public:
  // Adds what a step's micro-batches of the bin `tokens` (SampleWeights::BinOf) visited, in (0, 1].
  // Other values are ignored.
  void Observe(uint64_t tokens, double density);
  // Returns the density of the bin; nullopt before it was observed in a few steps.
  std::optional<double> Of(uint64_t tokens) const;

 private:
  struct Average {
    double value = 0;
    int count = 0;
  };
  std::map<uint64_t, Average> averages_;  // by bin
};

}  // namespace ringleader::balance
