// Draws what heads are likely to choose, for predictions before and after a job's own reports.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "patterns/attention_options.h"
#include "ring/tile_loads.h"

namespace ringleader::patterns {

// Means over heads from a job's reports, 0: not measured; and what is known of its data.
struct PatternHints {
  double slashes = 0;    // block diagonals
  double verticals = 0;  // columns
  // Share of the causal tiles that a layer visits. It also depends on where the diagonals lie, so
  // where it is known, loads are scaled to it.
  double density = 0;
  // Lengths of documents that are kept apart, repeated until the sequence is full; empty: one.
  std::vector<int64_t> document_tokens = {};

  bool operator==(const PatternHints&) const = default;
};

// <random>'s distributions differ between libraries; plans must not.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  double Unit() { return static_cast<double>(engine_() >> 11) * 0x1.0p-53; }  // [0, 1)
  int64_t Below(int64_t n) { return static_cast<int64_t>(Unit() * static_cast<double>(n)); }

 private:
  std::mt19937_64 engine_;
};

// The `width` block diagonals next to and including the main one.
ring::HeadPattern Band(int64_t blocks, int64_t width);

// What the mask shows of the `width` block diagonals to either side of the main one, which counts.
// How long prefixes are nobody knows before the data: without them.
ring::HeadPattern Visible(const AttentionOptions& options, int64_t blocks, int64_t width);

// What tile `q` of queries sees by the mask, of `blocks` tiles: [0, SeenTiles). Without prefixes,
// as above.
int64_t SeenTiles(const AttentionOptions& options, int64_t blocks, int64_t q);

// Draws `heads` heads of one layer at `blocks` blocks; with `dense`, of a layer that stays dense.
// Deterministic in `seed`. Patterns that are known before the data give one exact head.
std::vector<ring::HeadPattern> SampleLayer(const AttentionOptions& options, bool dense,
                                           int64_t blocks, int heads, const PatternHints& hints,
                                           uint64_t seed);

}  // namespace ringleader::patterns
