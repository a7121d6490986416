// The numbers and the memory of one build of the vertical-slash index (MTraining, arXiv 2510.18830,
// section 4.1, Algorithm 1), which patterns/vertical_slash.cc walks through: estimate, merge over
// ranks, select. ringleader/kernels/index.h defines the arithmetic.
#pragma once

#include <cstdint>

#include "patterns/index/layer_index.h"
#include "ringleader/kernels/index_parts.h"

namespace ringleader::patterns {

struct VerticalSlash {
  kernels::ShardLayout layout;  // of this rank
  int32_t heads = 0;
  int32_t tile = 128;
  float scale = 0.0f;
  int32_t queries = 0;  // estimate queries: E
  const DeviceDocuments* documents = nullptr;
  // Budgets of every head; a mass of 1 is top-k.
  float column_mass = 1.0f, diagonal_mass = 1.0f;
  int32_t max_verticals = 0, max_slashes = 0;
  int32_t sink_tokens = 0, local_blocks = 0;
  kernels::IndexParts parts = {};  // of one rank; its max_columns is LayerIndex::max_columns

  // Where PrepareEstimate writes the estimate queries that this rank owns and zeros for the
  // others': [E, heads, d] of q's type. Without memory, they are the last E rows of q.
  DeviceArray<std::byte> query_rows = {};
  DeviceArray<int64_t> query_positions = {};  // [E], from PrepareEstimate
  DeviceArray<float> row_max = {};            // [heads, E], from RowMax
  DeviceArray<int64_t> row_sum = {};          // [heads, E], from RowSum
  DeviceArray<int32_t> column_mass_of = {};   // [heads, n], from Mass
  // Of all ranks; Mass writes this rank's masses of diagonals, Candidates its candidates.
  DeviceArray<int32_t> gathered = {};  // [ranks, parts.elements()]
  // From MergeParts: the masses of diagonals summed over ranks, then candidates as Select takes
  // them. With one rank the memory of `gathered`.
  DeviceArray<int32_t> merged = {};  // merged_parts().elements()

  int32_t* mine() const { return gathered.data() + layout.rank * parts.elements(); }
  kernels::IndexParts merged_parts() const {
    return {
        .heads = heads, .blocks = parts.blocks, .max_columns = parts.max_columns * layout.ranks};
  }
  const int32_t* merged_diagonal_mass() const { return merged.data(); }
  const int32_t* merged_candidate_mass() const {
    return merged.data() + merged_parts().candidate_mass();
  }
  const int32_t* merged_candidate_positions() const {
    return merged.data() + merged_parts().candidate_positions();
  }
};

}  // namespace ringleader::patterns
