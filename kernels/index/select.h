// Makes lists of masses, on the device: steps 4 and 5 of ringleader/kernels/index.h, and what
// follows from the choice. Integers throughout: the same lists as kernels/reference, whatever the
// order of threads and however many ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {

// What a head's estimate queries attend to, in units of 2^-22 of one query.
struct IndexMass {
  int64_t total = 0;
  int64_t columns = 0;    // of the chosen columns
  int64_t diagonals = 0;  // of the chosen block diagonals
  // 1 where the budget's count ended the choice before its mass was reached.
  int64_t columns_at_budget = 0;
  int64_t diagonals_at_budget = 0;

  // What both columns and diagonals hold counts twice.
  RINGLEADER_HOST_DEVICE double Recall() const {
    return total > 0 ? static_cast<double>(columns + diagonals) / static_cast<double>(total) : 0.0;
  }
};

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

// Step 5, from the candidates of all ranks, in rank order. The main diagonal and the local_blocks
// next to it are forced, as are columns before sink_tokens.
struct SelectArgs {
  const int32_t* candidate_mass = nullptr;       // [ranks, heads, max_columns]
  const int32_t* candidate_positions = nullptr;  // [ranks, heads, max_columns]
  int64_t candidate_stride = 0;  // from a rank's candidates to the next's; 0: they are dense
  const int32_t* diagonal_mass = nullptr;  // [heads, blocks], summed over ranks
  HeadBudgets column_budgets = {};         // counts at most max_columns
  HeadBudgets diagonal_budgets = {};
  bool diagonals_by_tiles = false;  // DiagonalCost's
  int64_t content_tokens = 0;       // before the padding, whose tiles cost nothing; 0: all
  ShardLayout layout;               // of this rank; below 2^31 tokens
  int32_t heads = 0;
  int32_t tile = 128;
  int32_t max_columns = 0;
  int32_t sink_tokens = 0;
  int32_t local_blocks = 0;
  // SelectWorkspaceBytes(heads, tokens) bytes, aligned to 16; not read when that is 0.
  void* workspace = nullptr;

  int64_t* column_positions = nullptr;  // [heads, max_columns]: ColumnSelection
  int32_t* column_counts = nullptr;     // [heads]
  uint64_t* diagonals = nullptr;        // [heads, (blocks + 63) / 64]: TileSelection
  int32_t* diagonal_counts = nullptr;   // [heads]
  // The chosen diagonals by residue modulo ranks, ascending: with stripes of one tile those of
  // residue (rank - owner) are what a step of the ring visits. Residue r of head h:
  // residues[h * blocks + residue_offsets[h * (ranks + 1) + r] ..+ r + 1].
  int32_t* residue_offsets = nullptr;  // [heads, ranks + 1]
  int32_t* residues = nullptr;         // [heads, blocks]
  // Tiles that this rank's queries visit with the keys of each owner, summed over heads: with a
  // ring schedule, the exact load of every ring step.
  int64_t* load = nullptr;      // [ranks]
  IndexMass* masses = nullptr;  // [heads]

  RINGLEADER_HOST_DEVICE int64_t content_blocks() const {
    return ((content_tokens == 0 ? layout.tokens : content_tokens) + tile - 1) / tile;
  }

  RINGLEADER_HOST_DEVICE int64_t next_rank() const {
    return candidate_stride > 0 ? candidate_stride : int64_t{heads} * max_columns;
  }
};
// 0 up to a sequence of 1,048,576 tokens.
size_t SelectWorkspaceBytes(int32_t heads, int64_t tokens);
absl::Status Select(const SelectArgs& args, cudaStream_t stream);

// AdaptedCount of each head's columns and diagonals, from a selection under the same budget for
// all. max_counts: [2, heads]
absl::Status AdaptBudgets(const IndexMass* masses, int32_t heads, int32_t* max_counts,
                          cudaStream_t stream);

}  // namespace ringleader::kernels::index
