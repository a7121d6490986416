// Queries that chose blocks of keys each for itself (QueryChoice), gathered by block: attention to
// the gathered rows computes what was chosen, where attention to the tiles that some query of a
// tile chose computes several times as much (FlashMoBA, arXiv 2511.11571, section 4, gathers for
// the same reason). Each query's own block, which all queries of a tile share, is left to such
// tiles.
//
// A head's rows are the pairs of a query and a block before its own that it chose and of which the
// owner has keys: by block and, of one block, by query. The rows of a block begin at a multiple of
// `tile`; what is left of its last tile is padding, of zeros whose log-sum-exp is -infinity, whose
// output nobody reads and which has no gradients. All launchers enqueue on `stream`; bits do not
// depend on threads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {

// Lists of all heads, on the device.
struct QueryRowsArgs {
  const uint32_t* chosen = nullptr;  // QueryChoice::chosen
  ShardLayout query_layout = {};
  ShardLayout key_layout = {};  // of the owner
  int32_t heads = 0;
  int32_t tile = 128;
  int32_t block_size = 1024;  // tokens, a multiple of tile
  // Rows that a head has room for, a multiple of tile (PlanQueryRows). A head with more gets none.
  int64_t capacity = 0;

  int64_t tiles() const { return capacity / tile; }
  // Entries of one head's lists, in either direction.
  int64_t entries() const { return tiles() * (block_size / tile); }
  int64_t blocks() const { return (query_layout.tokens + block_size - 1) / block_size; }
  int64_t key_tiles() const { return (key_layout.local_tokens() + tile - 1) / tile; }

  // [heads, blocks, QueryWords(n)]: rows of the block before those of the word's queries.
  int32_t* before = nullptr;
  int32_t* counts = nullptr;      // [heads, blocks]: rows, less padding
  int32_t* first_rows = nullptr;  // [heads, blocks + 1]: where a block's begin
  // kCsr's, of the rows' tiles against the owner's; each head's entries by themselves.
  int32_t* row_offsets = nullptr;     // [heads, tiles() + 1]
  int32_t* columns = nullptr;         // [heads, entries()]
  int32_t* column_offsets = nullptr;  // [heads, key_tiles() + 1]
  int32_t* rows = nullptr;            // [heads, entries()]
};
absl::Status ListQueryRows(const QueryRowsArgs& args, cudaStream_t stream);

// The tiles of all heads' lists are added to *tiles.
absl::Status CountQueryRowTiles(const QueryRowsArgs& args, int64_t* tiles, cudaStream_t stream);

// Bits of a choice in which each tile of queries keeps its own block alone.
// chosen: [heads, query tiles, BlockWords(blocks)]
absl::Status ChooseOwnBlocks(const ShardLayout& queries, int32_t heads, int32_t tile,
                             int32_t block_size, uint32_t* chosen, cudaStream_t stream);

// Heads [first, first + count) of the lists, whose gathered rows are [count, capacity, d].
struct HeadRange {
  int32_t first = 0, count = 0;
};

// What the rows are gathered from, all heads', and where to. Backward's parts may be null.
struct GatherQueriesArgs {
  TokenMajor<const __nv_bfloat16> q = {};      // [n, heads, d], d 64 or 128
  TokenMajor<const __nv_bfloat16> d_out = {};  // [n, heads, d]
  const float* lse = nullptr;                  // [heads, n]
  const float* delta = nullptr;                // [heads, n]
  const int32_t* document_starts = nullptr;    // [n], with one head; null: one document

  __nv_bfloat16* rows_q = nullptr;      // [count, capacity, d]
  __nv_bfloat16* rows_d_out = nullptr;  // [count, capacity, d]
  // [count, capacity]. Without rows_d_out, as forward wants it, all rows get -infinity.
  float* rows_lse = nullptr;
  float* rows_delta = nullptr;     // [count, capacity]
  int32_t* rows_starts = nullptr;  // [capacity]; padding sees nothing
};
absl::Status GatherQueries(const QueryRowsArgs& lists, const HeadRange& heads,
                           const GatherQueriesArgs& args, cudaStream_t stream);

// Merges the rows' outputs into their queries': out and lse as in AttentionForwardArgs.
// rows_out: [count, capacity, d], read only where rows_lse, [count, capacity], says it was written.
absl::Status MergeQueryRows(const QueryRowsArgs& lists, const HeadRange& heads,
                            const float* rows_out, const float* rows_lse,
                            const TokenMajor<float>& out, float* lse, cudaStream_t stream);

// Adds the rows' gradients, [count, capacity, d], to their queries'.
absl::Status AddQueryRows(const QueryRowsArgs& lists, const HeadRange& heads, const float* rows_dq,
                          const TokenMajor<float>& dq, cudaStream_t stream);

}  // namespace ringleader::kernels::index
