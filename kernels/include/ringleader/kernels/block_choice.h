// How a pattern chooses key blocks for each tile of queries, cut where ranks exchange: steps over a
// call's queries and keys that the CPU engine (reference/) and GPUs (index/) both take. A pattern
// that chooses in another way adds its steps here and their arithmetic to the two engines.
//
// A choice is a bit for each block of the sequence: bit B of row [head, query tile] is
// chosen[row * BlockWords(blocks) + B / 32] >> B % 32 & 1.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <variant>
#include <vector>

#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/balance_steps.h"
#include "ringleader/kernels/block_mass.h"
#include "ringleader/kernels/fixed_blocks.h"
#include "ringleader/kernels/index.h"
#include "ringleader/kernels/seen_keys.h"
#include "ringleader/kernels/shard_layout.h"
#include "ringleader/kernels/spread_rows.h"

namespace ringleader::kernels {

RINGLEADER_HOST_DEVICE inline int32_t BlockWords(int32_t blocks) {
  return (blocks + 31) / 32;
}

// The halves of a budget (OfHalves) that a head has. `head_halves`: [heads]; null: 2 each, a whole.
RINGLEADER_HOST_DEVICE inline int32_t HalvesOf(const int32_t* head_halves, int32_t head) {
  return head_halves == nullptr ? 2 : head_halves[head];
}

// The sums of the keys of each tile of this rank that its mean counts, added in the order of tokens
// in fp32. The sum of a block is that of its tiles, from the one on that holds the first key which
// the block's mean counts.
struct TileKeySumsStep {
  ShardLayout layout = {};  // of the keys
  MeanKeys counted = {};
  int32_t tile = 128;
  float* sums = nullptr;  // [local tiles, kv_heads, head_dim]
};

// Rows of the local tiles of all ranks, in the order of the sequence.
struct OrderTilesStep {
  const float* gathered = nullptr;  // [ranks, local tiles, row]
  ShardLayout layout;
  int32_t tile = 128;
  int64_t row = 0;
  float* ordered = nullptr;  // [tiles of the sequence, row]
};

// Of a rank's first queries, so many choose: what comes after them is padding.
inline constexpr int64_t kAllChoose = std::numeric_limits<int64_t>::max();

// Each tile of queries keeps its own block and, of the others that it sees a key of, the
// topk_blocks whose mean key its summed query, or the first one alone, scores highest, in fp32;
// ties go to the lower block in even heads, to the higher one in odd heads (TiesGoLate). A head
// with another budget keeps OfHalves of topk_blocks.
//
// A move keeps more or fewer of the blocks, its own counted. What a row is estimated to cover is
// the softmax of the scores of the blocks but its own, each the mean logit of its queries and
// the block's mean key, in units of 2^-kMassBits.
struct MeanGateStep {
  const float* key_sums = nullptr;  // [tiles of the sequence, kv_heads, head_dim]
  MeanKeys counted = {};            // TileKeySumsStep's
  ShardLayout query_layout;
  SeenKeys seen = {};
  int32_t tile = 128;
  int32_t block_size = 512;  // tokens, a multiple of tile
  int32_t topk_blocks = 0;
  const int32_t* head_halves = nullptr;  // HalvesOf
  int64_t choosing = kAllChoose;
  bool first_query_gates = false;  // by a query that no other of its tile precedes
  float scale = 0.0f;              // of logits; for a move alone
  ChoiceMove move = {};
  uint32_t* chosen = nullptr;  // [heads, query tiles, BlockWords(blocks)]
};

// MoBA's gate (arXiv 2502.13189, section 2.2): each query keeps its own block and of the earlier
// ones, from the one on where its document starts, those whose mean key it scores highest; ties go
// to the lower block in even heads, to the higher one in odd heads (TiesGoLate). It keeps
// topk_blocks, its own counted, or MostBlocks(density, those that it sees) if there is a density,
// and its own at least; of a head with another budget OfHalves what it keeps besides its own.
//
// A move keeps more or fewer of the blocks, its own counted. What a query is estimated to cover is
// the softmax of its scores of the blocks before its own, in units of 2^-kMassBits.
struct QueryGateStep {
  const float* key_sums = nullptr;  // [tiles of the sequence, kv_heads, head_dim]
  MeanKeys counted = {};            // TileKeySumsStep's
  ShardLayout query_layout = {};
  const int32_t* document_starts = nullptr;  // [n]: TileSelection::document_starts
  int32_t tile = 128;
  int32_t block_size = 1024;  // tokens, a multiple of tile
  int32_t topk_blocks = 1;
  float density = 0.0f;                  // in [0, 1]
  const int32_t* head_halves = nullptr;  // HalvesOf
  float scale = 0.0f;                    // of logits; for a move alone
  ChoiceMove move = {};
  uint32_t* queries = nullptr;  // [heads, blocks, QueryWords(n)]: QueryChoice::chosen
  // [heads, query tiles, BlockWords(blocks)]: whether some query of the tile keeps the block.
  uint32_t* chosen = nullptr;
};
// Blocks that a sequence may have for it.
inline constexpr int32_t kMaxGatedBlocks = 640;

// This rank's keys, dense, for a Gather of all ranks' and, as rows of 4 bytes, OrderTilesStep.
struct PackKeysStep {
  void* packed = nullptr;  // [n, kv_heads, head_dim], of k's type
};

// The last whole group of 1 << stride_log2 keys of which local group `row` of queries, as many,
// sees a key.
RINGLEADER_HOST_DEVICE inline int64_t LastGroupOf(const SeenKeys& seen, const ShardLayout& layout,
                                                  int32_t stride_log2, int64_t row) {
  if (seen.intervals == nullptr) return layout.Position(row << stride_log2) >> stride_log2;  // own
  const int64_t last = seen.Last(layout, ((row + 1) << stride_log2) - 1) >> stride_log2,
                whole = layout.tokens >> stride_log2;
  return last < whole ? last : whole - 1;
}

// XAttention (arXiv 2503.16428, section 2): queries and keys are cut into groups of `stride`
// tokens; what a group of queries sees of a group of keys is the mean logit along their
// antidiagonal (its i-th query with its (stride - 1 - i)-th key), and the softmax of these over the
// groups of keys that it sees is its mass: from the one with the first key of its first query to
// the one with the last key of its last query. The mass of a block is the sum over the groups
// of a tile of queries and those of the block. The tile keeps its own block, the first that it
// sees, and then the others by falling mass, ties to the lower block in even heads and to the
// higher one in odd heads (TiesGoLate), until they hold `threshold` of all its mass or are
// MostBlocks(density, those that it sees); one without mass is not kept. A head with another budget
// keeps at most OfHalves of what that leaves besides its own block and the first one.
//
// A group's mass is 2^kMassBits (index.h), rounded once for each block, so that what is kept
// depends on neither threads nor ranks. Groups that the end of the sequence, or of the queries that
// choose, cuts short have none.
//
// kMaxScoredBlocks of a sequence at most.
struct AntidiagonalGateStep {
  // [tokens, kv_heads, head_dim], of k's type: the keys of the whole sequence. Null: k holds them.
  const void* keys = nullptr;
  ShardLayout query_layout = {};
  SeenKeys seen = {};
  int32_t tile = 128;                    // of queries, and of the keys of a block
  int32_t stride = 16;                   // tokens, 8 to 64, a power of two
  int64_t choosing = kAllChoose;         // queries
  float scale = 0.0f;                    // of logits
  float threshold = 0.9f;                // in (0, 1]
  float density = 0.0f;                  // in [0, 1]
  const int32_t* head_halves = nullptr;  // HalvesOf
  ChoiceMove move = {};                  // of the blocks that it keeps, all counted
  uint32_t* chosen = nullptr;  // [heads, query tiles, BlockWords(blocks of `tile` tokens)]
};

// A GPU keeps the masses of a tile of queries in shared memory.
inline constexpr int32_t kMaxScoredBlocks = 48'000;

// How many groups tiles of queries keep. What a tile keeps grows with the square root of how far
// it is into its document, for early queries look for nearly as many keys as late ones, and a share
// of few keys loses them; it adds up to a share of a whole sequence's tiles, each tile's own
// counted.
// What logits of a query are compared with, so that each query of a tile has a say, is the largest
// of all that it sees. Where a tile keeps many groups for each of its queries, of all its heads, a
// sample will do: the tile's own keys and, of each kSampleEvery keys before it, SampleKey. Of the
// keys that it misses, kSampleEvery - 1 on average lie above the best that a query finds in it,
// however logits are distributed; of all queries, they are to be no more than half of what the tile
// keeps.
inline constexpr int32_t kSampleEvery = 4;
RINGLEADER_HOST_DEVICE inline int32_t SampledFrom(int32_t tile, int32_t heads_together) {
  return 2 * (kSampleEvery - 1) * tile * heads_together;
}
// Returns where the i-th key of the sample is, one of the i-th kSampleEvery keys: by a hash, so
// that of what repeats in a text, at whatever distance, as much is met as of all.
RINGLEADER_HOST_DEVICE inline int32_t SampleKey(int32_t i) {
  uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B1u;
  x = (x ^ x >> 15) * 0x85EBCA77u;
  x = (x ^ x >> 13) * 0xC2B2AE3Du;
  return i * kSampleEvery + static_cast<int32_t>(x >> 30);
}

struct KeyGroupBudget {
  // Groups for each square root of a token, the tile's own counted; below 0: all groups.
  double rate = -1.0;
  int32_t tile = kGroupTile;  // queries of a tile
  // attention.balance: the factor of what a tile keeps, its own counted, and the largest share that
  // it may lose of the others. They are those of highest score, so that whatever mass grows with
  // the score, no larger share of it is lost.
  float move = 1.0f, tolerance = 0.0f;

  // Groups that a tile keeps whose first query is at `first`, in a document that starts at `start`,
  // in a head with `halves` of the budget (OfHalves), the tile's own not counted.
  RINGLEADER_HOST_DEVICE int32_t MostGroups(int64_t first, int64_t start,
                                            int32_t halves = 2) const {
    const int64_t all = (first - start + kGroupKeys - 1) / kGroupKeys;
    const int64_t own = tile / kGroupKeys;
    int64_t kept = all;
    if (rate >= 0.0) {
      const double places = sqrt(static_cast<double>(first - start + tile));
      kept = Between(0, static_cast<int64_t>(rate * places) - own, all);
      kept = Between(0, OfHalves(static_cast<int32_t>(kept), halves), all);
    }
    if (move == 1.0f) return static_cast<int32_t>(kept);
    const double with_own = static_cast<double>(kept + own);
    const auto moved = static_cast<int64_t>(static_cast<double>(move) * with_own) - own,
               lost =
                   static_cast<int64_t>(static_cast<double>(tolerance) * static_cast<double>(kept));
    return static_cast<int32_t>(Between(move < 1.0f ? kept - lost : kept, moved, all));
  }
  // Whether a sample will do for that tile, of so many heads: as it is without `move`, which
  // changes how many groups are kept, and not which come first.
  RINGLEADER_HOST_DEVICE bool IsSampled(int64_t first, int64_t start, int32_t halves,
                                        int32_t heads_together) const {
    KeyGroupBudget unmoved = *this;
    unmoved.move = 1.0f;
    return unmoved.MostGroups(first, start, halves) >= SampledFrom(tile, heads_together);
  }

 private:
  RINGLEADER_HOST_DEVICE static int64_t Between(int64_t least, int64_t value, int64_t most) {
    return value < least ? least : value < most ? value : most;
  }
};

// The budget that adds up to `density`, in (0, 1], of a sequence of `tokens`. With places x from 0
// to 1 it is a sqrt(x), at most x, whose sum over that of x is (4 a - a^4) / 3.
inline KeyGroupBudget KeyGroupBudgetOf(float density, int64_t tokens, int32_t tile = kGroupTile) {
  if (density >= 1.0f) return {.tile = tile};
  double a = 0.0;
  for (int i = 0; i < 32; ++i) a = 0.25 * (3.0 * static_cast<double>(density) + a * a * a * a);
  return {.rate = a * sqrt(static_cast<double>(tokens)) / kGroupKeys, .tile = tile};
}

// Groups of keys are chosen by scores of kScoreDims dimensions in e4m3 (e4m3.h), which choose as
// well as all of them in full and take a fraction of the time. Three steps make these rows:
// energies, which ranks sum, say which dimensions matter; all ranks pick the same; and each narrows
// its rows.
inline constexpr int32_t kScoreDims = 64;  // bytes of a narrow row; zeros where a head has fewer
// No code is larger in magnitude than 14, a 32nd of the largest in e4m3: sums of kScoreDims
// products thereby are less than 2^14, and half precision holds them and their differences.
inline constexpr float kScoreScaling = 0x1p-5f;

// A square counts in units of 2^-kEnergyBits, rounded to the nearest, and no more than MostEnergy;
// that of what is no finite number is 0. Sums of these integers are the same in any order.
inline constexpr int32_t kEnergyBits = 24;
// A power of two, so that the energies of `terms` values add up to less than 2^63.
RINGLEADER_HOST_DEVICE inline float MostEnergy(int64_t terms) {
  float most = 0x1p62f;
  for (int64_t sum = 1; sum < terms; sum *= 2) most *= 0.5f;
  return most;
}

// Sums up this rank's first `rows` queries, over the query heads of a KV head, and as many keys.
// Both results are [2, kv_heads, head_dim]: of queries, then of keys; ranks take the sum and the
// maximum.
struct DimEnergyStep {
  int64_t tokens = 0;         // of the sequence, those that all ranks sum up; at most 2^30
  int64_t rows = 0;           // of them this rank's: what comes after them is padding
  int64_t* energy = nullptr;  // sums of squares
  float* largest = nullptr;   // magnitudes of what is finite
};

// The dimensions of a KV head are the kScoreDims of largest product of the energies of queries and
// keys, both as doubles; ties go to the lower one. The scales of its queries and of its keys are
// E4m3ScaleOf the largest of their magnitudes in these dimensions.
struct PickDimsStep {
  const int64_t* energy = nullptr;  // DimEnergyStep's, of all ranks
  const float* largest = nullptr;
  int32_t* dims = nullptr;  // [kv_heads, kScoreDims], ascending; -1 from head_dim on
  // [2, kv_heads]: kScoreScaling times E4m3Scale's, of queries, then of keys.
  float* inverses = nullptr;
};

// This rank's rows in e4m3: the value of a picked dimension times the inverse of the scale, rounded
// to the nearest, ties to even. A row that is not finite in any of its dimensions is NaN in all of
// these.
struct NarrowRowsStep {
  const int32_t* dims = nullptr;  // PickDimsStep's
  const float* inverses = nullptr;
  SpreadRows rows = {};        // of queries; padding is NaN
  uint8_t* queries = nullptr;  // [rows.Rows(n), heads, kScoreDims]
  uint8_t* keys = nullptr;     // [n, kv_heads, kScoreDims]
};

// Groups of kGroupKeys keys for tiles of 64 or 16 queries, of one head or of two neighbours that
// choose together. The score of a group is the largest, over the visible pairs of a query of the
// tile, of any of these heads, and a key of the group, of scale * q.k of their narrow rows less the
// query's largest such product over all keys that it sees or, where a sample will do
// (KeyGroupBudget), over those of the sample, and no more than 0; a query with no visible pair in
// the group has no say, nor has a pair whose product is NaN. Candidates are the groups that lie
// before the tile's first query and hold a key of its document or of a later query's. The tile
// keeps those with the highest scores, ties to the lower group in even rows of heads, to the higher
// one in odd ones (TiesGoLate): as many as its budget says, all candidates where there are fewer.
struct KeyGroupGateStep {
  const uint8_t* queries = nullptr;  // [tile's Rows(n), heads, kScoreDims]: NarrowRowsStep's
  const uint8_t* keys = nullptr;     // [tokens, kv_heads, kScoreDims]: of the whole sequence
  ShardLayout query_layout = {};
  int32_t tile = kGroupTile;                 // queries, 64 or 16
  const int32_t* document_starts = nullptr;  // [n]: TileSelection::document_starts
  float scale = 0.0f;                        // of logits
  float density = 0.1f;                      // in (0, 1]
  // The length that the budget adds up to `density` of; 0: query_layout's. Samples of one job say
  // the same, so that what a sample sees does not depend on those it is dealt with.
  int64_t budget_tokens = 0;
  int32_t heads_together = 1;            // KeyGroups'
  const int32_t* head_halves = nullptr;  // HalvesOf; of heads that choose together the first's
  float move = 1.0f, tolerance = 0.0f;   // KeyGroupBudget's
  const int64_t* rows = nullptr;         // GroupRows of query_layout and tile
  uint32_t* chosen = nullptr;            // ChosenGroups'

  KeyGroupBudget budget() const {
    KeyGroupBudget budget =
        KeyGroupBudgetOf(density, budget_tokens > 0 ? budget_tokens : query_layout.tokens, tile);
    budget.move = move;
    budget.tolerance = tolerance;
    return budget;
  }
};

// The groups that tiles of queries keep, a bit each: what is kept of a choice until backward. Each
// pass makes its lists of it.
struct ChosenGroups {
  const int64_t* rows = nullptr;  // [query tiles + 1]: GroupRows
  // [heads / heads_together, rows[query tiles]]: bit g % 32 of word g / 32 of a row says whether
  // group g of the sequence is kept.
  const uint32_t* chosen = nullptr;
  int32_t tile = kGroupTile;   // queries
  int32_t heads_together = 1;  // KeyGroups'
};

// Where the row of each of a rank's tiles of queries begins in a head's part of ChosenGroups, in
// words, and where the last one ends: rows have bits for the groups before their tile alone.
inline std::vector<int64_t> GroupRows(const ShardLayout& queries, int32_t tile = kGroupTile) {
  std::vector<int64_t> rows = {0};
  for (int64_t query = 0; query < queries.local_tokens(); query += tile) {
    rows.push_back(rows.back() +
                   BlockWords(static_cast<int32_t>(queries.Position(query) / kGroupKeys)));
  }
  return rows;
}

// The lists of all owners' groups.
struct GroupLists {
  // [heads / heads_together, query tiles, capacity]: each row by owner, and of one owner ascending,
  // as its local groups.
  int32_t* groups = nullptr;
  // [ranks + 1, heads / heads_together, query tiles]: owner o's groups of a row are
  // groups[bounds[o]] to groups[bounds[o + 1] - 1].
  int32_t* bounds = nullptr;
  int64_t rows = 0;  // heads / heads_together * query tiles
  int32_t capacity = 0;
  int32_t heads_together = 1;  // KeyGroups'

  KeyGroups Of(const ShardLayout& owner) const {
    return {.groups = groups,
            .begins = bounds + owner.rank * rows,
            .ends = bounds + (owner.rank + 1) * rows,
            .capacity = capacity,
            .heads_together = heads_together};
  }
};

// How many of `seen` blocks a share of them allows; a share of 0 allows all.
RINGLEADER_HOST_DEVICE inline int32_t MostBlocks(float density, int32_t seen) {
  return density > 0 ? static_cast<int32_t>(static_cast<double>(density) * seen) : seen;
}

// How many blocks a tile that sees `seen` keeps at most besides the `forced` ones, of a head with
// `halves` of the budget (AntidiagonalGateStep).
RINGLEADER_HOST_DEVICE inline int32_t MostUnforced(float density, int32_t halves, int32_t seen,
                                                   int32_t forced) {
  const int32_t most = MostBlocks(density, seen);
  return most > forced ? OfHalves(most - forced, halves) : 0;
}

// How many blocks before its own a query keeps that sees `before` of them, of a head with `halves`
// of the budget (QueryGateStep).
RINGLEADER_HOST_DEVICE inline int32_t KeptBefore(int32_t topk_blocks, float density, int32_t halves,
                                                 int32_t before) {
  const int32_t with_own = density > 0 ? MostBlocks(density, before + 1) : topk_blocks;
  const int32_t kept = with_own > 1 ? OfHalves(with_own - 1, halves) : 0;
  return kept < before ? kept : before;
}

using BlockStep =
    std::variant<FixedBlocksStep, TileKeySumsStep, OrderTilesStep, MeanGateStep, QueryGateStep,
                 PackKeysStep, AntidiagonalGateStep, DimEnergyStep, PickDimsStep, NarrowRowsStep,
                 KeyGroupGateStep, BlockMassStep, MassGateStep, AdaptDensityStep, CountWorkStep,
                 FindMoveStep, SumChoicesStep, MoveBudgetsStep, HoldMassStep>;

}  // namespace ringleader::kernels
