// The oracle of XAttention's choice: fp64, pair by pair, over the whole sequence, as
// AntidiagonalGateStep (ringleader/kernels/block_choice.h) defines it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/reference/testing/sight.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::reference::testing {

// What groups of `stride` queries and keys have on their antidiagonals, which is most of the
// oracle's time and the same for every choice.
struct AntidiagonalLogits {
  // q: [tokens, heads, d] and k: [tokens, kv_heads, d], the whole sequence. Tokens behind the last
  // whole group are left out.
  AntidiagonalLogits(const TokenMajor<const float>& q, const TokenMajor<const float>& k,
                     int64_t stride);

  const int heads;
  const int64_t tokens, stride, groups;
  std::vector<double> sums;  // [heads, groups of queries, groups of keys], unscaled
};

class AntidiagonalOracle {
 public:
  // Reads the step's tile, scale, threshold, density and head_halves, in the host's memory; its
  // stride is that of the logits.
  AntidiagonalOracle(const AntidiagonalLogits& logits, const AntidiagonalGateStep& step,
                     const Sight& sight);

  // What the tile of queries at `tile` of the sequence sees of a block; a group's mass is 1.
  double Mass(int head, int64_t tile, int64_t block) const {
    return mass_[(head * blocks_ + tile) * blocks_ + block];
  }
  // What is wrong with keeping `kept`, ascending; "" if nothing. Masses count as equal within
  // `tolerance`, so that a choice within rounding of a threshold passes.
  std::string Complaint(int head, int64_t tile, const std::vector<int64_t>& kept,
                        double tolerance) const;
  // The same for all rows of a rank's choice, [heads, its query tiles, BlockWords].
  std::string Complaint(const uint32_t* chosen, const ShardLayout& layout, double tolerance) const;

 private:
  // How many blocks the tile may keep that sees `seen` of them, from `first` on.
  int64_t Most(int head, int64_t tile, int64_t first, int64_t seen) const;

  const AntidiagonalGateStep step_;
  const Sight sight_;
  const int heads_;
  const int64_t tokens_, blocks_;
  std::vector<double> mass_;  // [heads, tiles, blocks]
};

}  // namespace ringleader::kernels::reference::testing
