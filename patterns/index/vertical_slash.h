// The numbers and the memory of one build of the vertical-slash index (MTraining, arXiv 2510.18830,
// section 4.1, Algorithm 1), which patterns/kinds/vertical_slash.cc walks through: estimate, merge
// over ranks, select. ringleader/kernels/index.h defines the arithmetic.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "patterns/index/index_device.h"
#include "patterns/index/layer_index.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::patterns {

struct VerticalSlash {
  kernels::ShardLayout layout;  // of this rank
  int32_t heads = 0;
  int32_t tile = 128;
  int64_t blocks = 0;   // of `tile` tokens, of the sequence
  int64_t content = 0;  // tokens before its padding
  float scale = 0.0f;
  int32_t queries = 0;  // estimate queries: E
  bool spread = false;  // they lie all over the sequence
  const DeviceDocuments* documents = nullptr;
  // Budgets of every head; a mass of 1 is top-k. Where diagonals count by tiles, max_slashes is in
  // DiagonalCost's units.
  float column_mass = 1.0f, diagonal_mass = 1.0f;
  int32_t max_verticals = 0, max_slashes = 0;
  bool slashes_by_tiles = false;
  int32_t sink_tokens = 0, local_blocks = 0;
  int32_t max_columns = 0;  // LayerIndex's

  // PrepareEstimate writes the estimate queries that this rank owns and zeros for the others', of
  // q's type. Empty where the estimate queries are the last E rows of q.
  DeviceArray<std::byte> query_rows = {};     // [E, heads, d]
  DeviceArray<int64_t> query_positions = {};  // [E], from PrepareEstimate
  // PrepareEstimate writes both, for columns and for diagonals; AdaptBudgets moves the counts.
  DeviceArray<float> budget_masses = {};       // [2, heads]
  DeviceArray<int32_t> budget_counts = {};     // [2, heads]
  DeviceArray<float> row_max = {};             // [heads, E], from RowMax
  DeviceArray<int64_t> row_sum = {};           // [heads, E], from RowSum
  DeviceArray<int32_t> column_mass_of = {};    // [heads, n], from Mass
  DeviceArray<int32_t> diagonal_mass_of = {};  // [heads, blocks], from Mass
  // [ranks, 2, heads, max_columns]: the masses of each rank's candidates, then their positions, -1
  // in unused slots. Candidates writes this rank's.
  DeviceArray<int32_t> candidates = {};

  int64_t content_blocks() const { return (content + tile - 1) / tile; }
  int64_t candidate_slots() const { return int64_t{heads} * max_columns; }
  int32_t* CandidateMass(int rank) const {
    return candidates.data() + int64_t{rank} * 2 * candidate_slots();
  }
  int32_t* CandidatePositions(int rank) const { return CandidateMass(rank) + candidate_slots(); }
};

// Runs steps 1 and 2: fills query_rows to row_sum, the same on all ranks.
absl::Status EstimateRows(VerticalSlash& work, const IndexInputs& inputs, IndexDevice& device);

}  // namespace ringleader::patterns
