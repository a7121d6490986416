// From masses to lists, on the device: steps 4 and 5 of ringleader/kernels/index.h, and what
// follows from the choice. Integers throughout: the same lists as kernels/reference, whatever the
// order of threads and however many ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {

// Step 4: this rank's columns that can be among the chosen ones: the max_columns of largest mass,
// the forced ones (position < sink_tokens) first of all.
struct ColumnCandidatesArgs {
  const int32_t* column_mass = nullptr;  // [heads, n]
  ShardLayout layout;                    // of this rank
  int32_t heads = 0;
  int32_t max_columns = 0;
  int32_t sink_tokens = 0;       // at most max_columns
  int32_t* mass = nullptr;       // [heads, max_columns]
  int32_t* positions = nullptr;  // [heads, max_columns], ascending; -1 in unused slots, at the end
};
absl::Status SelectColumnCandidates(const ColumnCandidatesArgs& args, cudaStream_t stream);

// Step 5, columns: from the candidates of all ranks, in rank order.
struct SelectColumnsArgs {
  const int32_t* mass = nullptr;       // [ranks, heads, max_columns]
  const int32_t* positions = nullptr;  // [ranks, heads, max_columns]
  const int32_t* diagonal_mass =
      nullptr;          // [heads, blocks], summed over ranks; its sum is the total
  HeadBudgets budgets;  // counts at most max_columns
  int32_t ranks = 1;
  int32_t heads = 0;
  int32_t max_columns = 0;
  int32_t sink_tokens = 0;
  int64_t tokens = 0;  // of the sequence, below 2^31
  int32_t tile = 128;
  void* workspace = nullptr;            // SelectColumnsWorkspaceBytes(heads, tokens) bytes
  int64_t* column_positions = nullptr;  // [heads, max_columns]: ColumnSelection
  int32_t* counts = nullptr;            // [heads]
  int64_t* kept_mass = nullptr;         // [heads], of the chosen columns
};
size_t SelectColumnsWorkspaceBytes(int32_t heads, int64_t tokens);
absl::Status SelectColumns(const SelectColumnsArgs& args, cudaStream_t stream);

// Step 5, block diagonals. 0 to local_blocks are forced.
struct SelectDiagonalsArgs {
  const int32_t* diagonal_mass = nullptr;  // [heads, blocks], summed over ranks
  HeadBudgets budgets;
  int32_t heads = 0;
  int32_t blocks = 0;
  int32_t local_blocks = 0;
  int32_t ranks = 1;
  uint64_t* diagonals = nullptr;  // [heads, (blocks + 63) / 64]: TileSelection
  int32_t* counts = nullptr;      // [heads]
  int64_t* kept_mass = nullptr;   // [heads]
  int64_t* total_mass = nullptr;  // [heads]
  // The chosen diagonals by residue modulo `ranks`, ascending: with stripes of one tile those of
  // residue (rank - owner) are what a step of the ring visits. Residue r of head h:
  // residues[h * blocks + residue_offsets[h * (ranks + 1) + r] ..+ r + 1].
  int32_t* residue_offsets = nullptr;  // [heads, ranks + 1]
  int32_t* residues = nullptr;         // [heads, blocks]
};
absl::Status SelectDiagonals(const SelectDiagonalsArgs& args, cudaStream_t stream);

// The tiles that the queries of ranks [first_rank, first_rank + rank_count) visit with the keys of
// each owner, summed over heads: with a ring schedule, the exact load of every ring step.
struct DiagonalLoadArgs {
  const uint64_t* diagonals = nullptr;  // [heads, (blocks + 63) / 64]
  ShardLayout layout;                   // of any rank
  int32_t heads = 0;
  int32_t tile = 128;
  int32_t first_rank = 0;
  int32_t rank_count = 1;
  int64_t* load = nullptr;  // [rank_count, ranks]
};
absl::Status DiagonalLoad(const DiagonalLoadArgs& args, cudaStream_t stream);

}  // namespace ringleader::kernels::index
