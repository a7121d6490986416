// Blocks of keys chosen by their exact attention mass (AdaSpa, arXiv 2502.21079, section 4): steps
// over a call's queries and the keys of the whole sequence, which block_choice.h adds to its
// others.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "ringleader/kernels/balance_steps.h"
#include "ringleader/kernels/seen_keys.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels {

// Two passes in one (Algorithm 1, line 1 to 14): the sum of exp(logit - lse) over the pairs of a
// tile of queries and a block that are visible, in units of 2^-kMassBits (index.h), where lse is
// the logarithm of the query's sum of exp(logit) over the keys that it sees. A row's masses add up
// to its number of queries, but for rounding; what is not a number has none, nor need what it is
// added up with: on the CPU the rest of the tile's queries, on GPUs that of 64.
struct BlockMassStep {
  // [tokens, kv_heads, head_dim], of k's type: the keys of the whole sequence. Null: k holds them.
  const void* keys = nullptr;
  ShardLayout query_layout = {};
  SeenKeys seen = {};
  int32_t tile = 128;       // of queries, and of the keys of a block
  float scale = 0.0f;       // of logits, more than 0
  int32_t* mass = nullptr;  // [heads, query tiles, blocks of `tile` tokens of the sequence]
};

// On GPUs the step works on so many blocks of so many queries at a time, one a multiprocessor of an
// H100 or H200, and keeps a number for each query and 64 keys of a sequence of `tokens`.
inline constexpr int32_t kMassSlots = 132;
inline constexpr int32_t kMassQueries = 256;
inline int64_t MassHalves(int64_t tokens) {
  return (tokens + 127) / 128 * 2;
}
inline int64_t MassSumsBytes(int64_t tokens) {
  return static_cast<int64_t>(sizeof(float)) * kMassSlots * kMassQueries * MassHalves(tokens);
}

// Each tile of queries keeps its own block and, of the V others of which it sees a key, the
// BlocksOfShare(density[head], V) of largest mass;
// ties go to the lower block in even heads, to the higher one in odd heads (TiesGoLate).
// kept[head] and total[head] are the masses of what is kept and of all, of this rank's queries.
// Moved (balance_steps.h), a tile keeps `move.factor` of its blocks, its own counted (MovedCount,
// by MovePlace), but as many at least as HeldMass asks for, of the masses of all that it sees.
struct MassGateStep {
  const int32_t* mass = nullptr;  // BlockMassStep's
  ShardLayout query_layout = {};
  SeenKeys seen = {};
  // Tokens before the padding at the sequence's end: tiles of padding alone add nothing to kept and
  // total.
  int64_t content = std::numeric_limits<int64_t>::max();
  int32_t heads = 0;
  int32_t tile = 128;
  const float* density = nullptr;  // [heads], in [0, 1]
  ChoiceMove move = {};
  uint32_t* chosen = nullptr;  // [heads, query tiles, BlockWords(blocks)]
  int64_t* kept = nullptr;     // [heads]
  int64_t* total = nullptr;    // [heads]
};
// How many of `seen` blocks a share of them is, rounded up.
RINGLEADER_HOST_DEVICE inline int32_t BlocksOfShare(float density, int32_t seen) {
  const auto count = static_cast<int32_t>(ceilf(density * static_cast<float>(seen)));
  return count < seen ? count : seen;
}
// Blocks that a sequence may have for it.
inline constexpr int32_t kMaxMassBlocks = 12'000;

// Moves density from heads that lose little to heads that lose much (section 4.3). Let c be the
// number of heads whose recall, kept / total, exceeds `threshold`, but at most half of all. The c
// heads of highest recall get half of `density`, the c of lowest recall 1.5 times as much, the
// others `density`, so that the mean stays. Ties go to the lower head. Sums of all ranks go in.
struct AdaptDensityStep {
  const int64_t* kept = nullptr;   // [heads]
  const int64_t* total = nullptr;  // [heads]
  int32_t heads = 0;               // at most 1,024
  float density = 0.0f;            // in (0, 2/3], so that half more is at most 1
  float threshold = 0.0f;
  float* head_density = nullptr;  // [heads]
};

inline constexpr int32_t kMaxAdaptedHeads = 1024;

// The recall of a head that has `kept` of `total`.
RINGLEADER_HOST_DEVICE inline double RecallOf(int64_t kept, int64_t total) {
  return total > 0 ? static_cast<double>(kept) / static_cast<double>(total) : 0.0;
}

// A head's density, if `better` heads are before it by falling recall and `good` heads exceed the
// threshold.
RINGLEADER_HOST_DEVICE inline float AdaptedDensity(float density, int better, int good, int heads) {
  const int moved = good < heads / 2 ? good : heads / 2;
  if (better < moved) return 0.5f * density;
  return better >= heads - moved ? 1.5f * density : density;
}

}  // namespace ringleader::kernels
