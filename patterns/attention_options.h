// What a job asks of attention: plain data that the trainer fills in from the job file and the
// plan.
#pragma once

#include <cstdint>
#include <vector>

#include "patterns/index/balance_options.h"
#include "patterns/index/mask.h"
#include "ring/ring_schedule.h"
#include "ringleader/kernels/fixed_blocks.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::patterns {

enum class Pattern {
  kDense,          // everything that the mask shows
  kSlidingWindow,  // the last `window` tokens
  kVerticalSlash,  // selected columns and block diagonals, estimated online per layer and head
  kBlockTopK,      // MoBA, by tile: every query block picks the key blocks it scores highest
  kMoba,           // MoBA as published: every query picks for itself
  kXAttention,     // every query block picks key blocks by sums of antidiagonals
  kKeyGroups,      // tiles of 64 or 16 queries pick groups of 8 keys by their best pairs
  kAdaSpa,         // every query block picks the key blocks of largest exact attention mass
  kFixedBlocks,    // positions say which key blocks every query block keeps
};

// Which queries may take part in choosing what a query attends to.
enum class Selection {
  kFull,    // all that the pattern takes
  kCausal,  // none that comes later
};

// kVerticalSlash: how columns and diagonals are chosen.
enum class Select {
  kTopP,  // until the budget's mass is covered, at most its counts
  kTopK,  // the budget's counts
};

// kVerticalSlash: where the queries lie from which both are estimated.
enum class EstimateAt {
  kEnd,     // at the end of the sequence, or of its documents
  kSpread,  // all over the sequence
};

// kVerticalSlash: how many columns and diagonals are chosen.
struct VerticalSlashBudget {
  double vertical_mass = 0.9;  // in (0, 1]
  double slash_mass = 0.9;
  uint32_t max_verticals = 4096;  // columns (tokens)
  uint32_t max_slashes = 256;     // block diagonals
  // Share of the causal tiles that a head may visit, in (0, 1]; 0: the two counts hold instead.
  double density = 0.0;
};

struct AttentionOptions {
  Pattern pattern = Pattern::kDense;
  Mask mask = Mask::kCausal;
  int64_t mask_block = 0;           // kBlockCausal: tokens, at least 1
  Select select = Select::kTopP;    // kVerticalSlash, as the next
  VerticalSlashBudget budget = {};  // kVerticalSlash
  std::vector<int> dense_layers = {};
  int64_t dense_below = 0;  // documents of fewer tokens attend to all of their tokens
  BalanceOptions balance = {};
  Selection selection = Selection::kFull;
  int probe_every = 0;        // steps between two probes of the recall; 0: never
  int estimate_queries = 64;  // kVerticalSlash: at most 256
  EstimateAt estimate_at = EstimateAt::kEnd;
  // Of patterns that choose by data: heads of low recall get more of the budget.
  bool adapt_heads = false;
  // With adapt_heads: by what probes found in earlier steps (patterns/index/head_budgets.h), which
  // kVerticalSlash and kAdaSpa alone can do without.
  bool adapt_by_probe = false;
  int sink_tokens = 64;    // kVerticalSlash: columns at the start that are always kept
  int local_blocks = 1;    // kVerticalSlash: block diagonals that are, besides the main one;
                           // kFixedBlocks: kernels::FixedBlocks', as the next two
  int sink_blocks = 1;     // kFixedBlocks
  int stride_blocks = 16;  // kFixedBlocks
  int64_t window = 0;      // kSlidingWindow: tokens a query sees, itself included
  int block_size = 512;    // kBlockTopK, kMoba: keys of a block, a multiple of `tile`
  int topk_blocks = 8;     // kBlockTopK: blocks kept besides a query's own; kMoba: with it
  int stride = 16;         // kXAttention: tokens whose logits a score averages
  double threshold = 0.9;  // kXAttention: share of the mass that a tile's blocks cover, (0, 1]
  // kXAttention: of the blocks that a tile sees, at most; kMoba: of those that a query sees. 0:
  // none is given. kKeyGroups: of the keys that a tile sees, (0, 1]. kAdaSpa: of the blocks before
  // it that a tile keeps, (0, 1].
  double density = 0.0;
  // kKeyGroups: tokens of a sequence over which budgets add up to `density`, however its samples
  // are dealt; 0: as many as there are.
  int64_t sequence_length = 0;
  int group_queries = 64;  // kKeyGroups: queries that choose together, 64 or 16
  int group_heads = 1;     // kKeyGroups: query heads of a KV head that do: 1, 2; 0: HeadsTogether
  int tile = 128;          // 64 or 128 tokens
  kernels::LayoutKind layout = kernels::LayoutKind::kStriped;
  int stripe = 0;  // tokens, a multiple of `tile`; 0: one tile
  // Documents lie as ring/document_layout.h says; `layout` is kStriped, for those that are spread.
  bool by_documents = false;
  ring::RingShape ring = {};
  int head_ranks = 1;  // ranks that share out the heads of each of the ring's (ring/head_shares.h)
  // ring::RingKind::kAllGather: groups of heads that are attended to one after the other, while the
  // keys and values of the next are gathered.
  int head_groups = 1;
  bool bf16_gradients = false;  // dK and dV travel in bfloat16, not float32; GPUs only
  bool deterministic = false;   // the same bits every time; the CPU engine's always are
  int threads = 1;              // of this rank's engine; CPU only
};

// Returns how many neighbouring query heads choose together, in a model or a trainer's part of one.
inline int HeadsTogether(const AttentionOptions& options, int64_t heads, int64_t kv_heads) {
  if (options.pattern != Pattern::kKeyGroups) return 1;
  if (options.group_heads > 0) return options.group_heads;
  return heads / kv_heads % 2 == 0 ? 2 : 1;
}

// kFixedBlocks: what every tile of queries keeps.
inline kernels::FixedBlocks FixedBlocksOf(const AttentionOptions& options) {
  return {
      .local = options.local_blocks, .sinks = options.sink_blocks, .stride = options.stride_blocks};
}

// Returns who holds which tokens, seen from `rank`. `options.stripe` is resolved.
inline kernels::ShardLayout LayoutOf(const AttentionOptions& options, int ranks, int rank,
                                     int64_t local_tokens) {
  return {.kind = options.layout,
          .ranks = ranks,
          .rank = rank,
          .stripe = options.stripe,
          .tokens = local_tokens * ranks};
}

}  // namespace ringleader::patterns
