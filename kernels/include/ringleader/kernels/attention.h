// Arguments of block-sparse causal attention, the same for the CPU engine (reference/) and the
// Hopper kernels (sm90/).
//
// All pointers are to memory of the engine that is called; nothing is owned. One call attends the
// queries of one rank to the keys of one owner: a step of the ring. Results merge into what earlier
// calls left (out, lse), so that summing the calls over all owners gives the attention over the
// whole sequence (online softmax: FlashAttention-2, arXiv 2307.08691, section 3.1).
#pragma once

#include <cstdint>

#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels {

// A [tokens, heads, head_dim] tensor; the last dimension is dense, strides are in elements.
template <typename T>
struct TokenMajor {
  T* data = nullptr;
  int64_t tokens = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

enum class TilePattern : int32_t {
  kFull = 0,      // every pair, no causal mask (dense columns, tests)
  kCausal = 1,    // key position <= query position
  kWindow = 2,    // causal, and query position - key position < window
  kToeplitz = 3,  // causal, and the block diagonal is set in `diagonals` (vertical-slash)
  kCsr = 4,       // causal, and the tile is listed
};

// Words of a bit for each of a rank's queries.
RINGLEADER_HOST_DEVICE inline int64_t QueryWords(int64_t queries) {
  return (queries + 31) / 32;
}

// Blocks of keys that queries chose each for itself.
struct QueryChoice {
  // [heads, blocks of the sequence, QueryWords(n_q)]: bit i % 32 of word i / 32 says whether local
  // query i attends to the block. Null: there is no such choice.
  const uint32_t* chosen = nullptr;
  int32_t block_size = 0;  // tokens, a multiple of `tile`
};

// Groups of consecutive keys that each tile of queries attends to beside the tiles of its pattern:
// tiles are of 64 queries, groups of kGroupKeys keys of one owner, and every key of a group has a
// position before the tile's first query. With kToeplitz.
inline constexpr int32_t kGroupKeys = 8;
inline constexpr int32_t kGroupTile = 64;  // the tile that groups go with
struct KeyGroups {
  // [heads / heads_together, query_tiles, capacity]: local keys kGroupKeys * g to
  // kGroupKeys * (g + 1) - 1 of the call's owner, ascending from begins[h, t] to ends[h, t]; the
  // rest of a row is other owners'. Null: there are none.
  const int32_t* groups = nullptr;
  const int32_t* begins = nullptr;  // [heads / heads_together, query_tiles]
  const int32_t* ends = nullptr;    // [heads / heads_together, query_tiles]
  int32_t capacity = 0;
  int32_t heads_together = 1;  // neighbours of a KV head that have rows in common: 1 or 2

  RINGLEADER_HOST_DEVICE int64_t RowOf(int32_t head, int64_t tile, int64_t query_tiles) const {
    return head / heads_together * query_tiles + tile;
  }
};

// Tiles that a row's groups before the `place`-th are counted as in reports: as many pairs,
// rounded. What lies between two places is the difference, so that the parts of a row add up to its
// whole.
RINGLEADER_HOST_DEVICE inline int32_t TilesOfGroups(int32_t place) {
  return (place + kGroupTile / kGroupKeys / 2) / (kGroupTile / kGroupKeys);
}

// The keys that one query attends to, at positions [begin, end) and [second_begin, second_end) of
// the sequence: 0 <= begin <= end <= second_begin <= second_end <= tokens. Equal bounds hold no
// key.
struct alignas(16) KeyIntervals {
  int32_t begin = 0;
  int32_t end = 0;
  int32_t second_begin = 0;
  int32_t second_end = 0;
};

// Which tiles a call visits. A tile is `tile` x `tile` tokens of the local shards; local tiles are
// whole global blocks (stripe and zigzag chunks are multiples of `tile`), so tile a of rank r is
// block Position(a * tile) / tile. Lists are per query head.
struct TileSelection {
  TilePattern pattern = TilePattern::kCausal;
  int32_t tile = 128;  // 64 or 128
  int64_t window = 0;  // tokens; kWindow

  // kToeplitz. Bit delta of head h, at diagonals[h * diagonal_words + delta / 64] >> (delta % 64) &
  // 1, says that query block A attends to key block A - delta, for every A. Bit 0 (the diagonal) is
  // always set.
  const uint64_t* diagonals = nullptr;
  int32_t diagonal_words = 0;

  // kCsr, by query tile: the key tiles of row a of head h are
  //   columns[row_offsets[h * (query_tiles + 1) + a] .. row_offsets[h * (query_tiles + 1) + a +
  //   1]), ascending.
  const int32_t* row_offsets = nullptr;  // [heads, query_tiles + 1]
  const int32_t* columns = nullptr;
  // kCsr, the transpose by key tile, for backward.
  const int32_t* column_offsets = nullptr;  // [heads, key_tiles + 1]
  const int32_t* rows = nullptr;

  // kCsr: of a listed tile only the queries attend that chose its block.
  QueryChoice choice = {};

  // kToeplitz with tiles of kGroupTile: alone, or outside the tiles that the diagonals cover.
  KeyGroups groups = {};

  // Where several documents are packed into the sequence: for each local query the position of its
  // document's first token, ascending; a query attends to keys of its own document alone. Null: the
  // sequence is one document. With every pattern but kFull.
  const int32_t* document_starts = nullptr;  // [n_q]

  // Any mask that is at most two intervals of keys for each query (kernels/masks/masks.h has some):
  // with kFull, or with kCsr, whose listed tiles then need not be causal. A query attends to the
  // keys of its intervals alone, and a tile is visited if one of its queries does. Without
  // document_starts and `choice`. Null: the pattern says all.
  const KeyIntervals* intervals = nullptr;  // [n_q]
};

// out and lse accumulate in fp32 over calls: start from out = 0 and lse = -infinity. A query
// without a key keeps both.
template <typename T>
struct AttentionForwardArgs {
  TokenMajor<const T> q;       // [n_q, heads, d]
  TokenMajor<const T> k;       // [n_k, kv_heads, d]; heads is a multiple of kv_heads
  TokenMajor<const T> v;       // [n_k, kv_heads, d]
  TokenMajor<float> out = {};  // [n_q, heads, d], normalised
  float* lse = nullptr;        // [heads, n_q], natural logarithm, of scaled logits
  // The output in the type of q, where out has no data: of a call that is all that its queries
  // attend to. It writes every row, zero for a query without a key; lse starts from -infinity as
  // ever. Without groups of keys. The CPU engine, whose T is fp32, takes out.
  TokenMajor<T> rounded_out = {};
  ShardLayout query_layout;  // kCausal in stripes: n_q and n_k may be the beginning of a part alone
  ShardLayout key_layout;    // same sequence; rank = owner of k and v
  TileSelection tiles;
  float scale = 0.0f;  // of logits; 1 / sqrt(d) as a rule
};

// Gradients add into dq, and into dk and dv, or into rounded_dk and rounded_dv. lse is the final
// one, over all owners and columns; delta is rowsum(d_out * out), computed once a layer.
template <typename T>
struct AttentionBackwardArgs {
  TokenMajor<const T> q, k, v;
  TokenMajor<const T> d_out;     // [n_q, heads, d]
  const float* lse = nullptr;    // [heads, n_q]
  const float* delta = nullptr;  // [heads, n_q]
  TokenMajor<float> dq;          // [n_q, heads, d]
  TokenMajor<float> dk, dv;      // [n_k, kv_heads, d]
  // The same gradients in the type of k and v, where dk and dv have no data. A call sums its terms
  // in fp32, adds what is there and rounds once. The CPU engine, whose T is fp32, takes dk and dv.
  TokenMajor<T> rounded_dk = {}, rounded_dv = {};
  ShardLayout query_layout;
  ShardLayout key_layout;
  TileSelection tiles;
  float scale = 0.0f;
  // The same bits every time (on Hopper: on GPUs with the same number of multiprocessors); kCsr
  // then needs its lists in both directions. The CPU engine always is deterministic.
  bool deterministic = false;
};

// Selected columns (verticals): keys that all later queries of a head see, gathered from their
// owners into dense rows. A query skips a column that lies ahead of it, and one whose tile its
// block diagonal covers already (`tiles`).
struct ColumnSelection {
  const int64_t* positions =
      nullptr;                      // [heads, max_columns], ascending; unused slots hold INT64_MAX
  const int32_t* counts = nullptr;  // [heads]
  int32_t max_columns = 0;
};

// Attention of every query head to its columns, which GatherColumns laid into dense rows. `tiles`
// is kToeplitz: what the diagonals cover is skipped. out and lse accumulate as in
// AttentionForwardArgs.
template <typename T>
struct ColumnForwardArgs {
  TokenMajor<const T> q;      // [n, heads, d]
  const T* keys = nullptr;    // [heads, max_columns, d]
  const T* values = nullptr;  // [heads, max_columns, d]; on Hopper finite in every row
  ColumnSelection columns;
  TileSelection tiles;
  ShardLayout query_layout;
  TokenMajor<float> out;  // [n, heads, d]
  float* lse = nullptr;   // [heads, n]
  float scale = 0.0f;
};

// Gradients add into dq, d_keys and d_values. lse, delta and deterministic: as in
// AttentionBackwardArgs.
template <typename T>
struct ColumnBackwardArgs {
  TokenMajor<const T> q, d_out;  // [n, heads, d]
  const T* keys = nullptr;       // [heads, max_columns, d]
  const T* values = nullptr;
  ColumnSelection columns;
  TileSelection tiles;
  ShardLayout query_layout;
  const float* lse = nullptr;    // [heads, n]
  const float* delta = nullptr;  // [heads, n]
  TokenMajor<float> dq;          // [n, heads, d]
  float* d_keys = nullptr;       // [heads, max_columns, d]
  float* d_values = nullptr;
  float scale = 0.0f;
  bool deterministic = false;
};

}  // namespace ringleader::kernels
