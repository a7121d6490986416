// What stands between the kernels of kernels/index and the exchanges between ranks, on the device.
// The rules of kernels/sm90/attention.h hold here, too.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/index/select.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/shard_layout.h"
#include "ringleader/kernels/spread_rows.h"

namespace ringleader::kernels::index {

// The estimate queries that this rank owns, zeros for the others', their positions, and a layer's
// budget for every head.
struct EstimateInputsArgs {
  TokenMajor<const __nv_bfloat16> q;  // [n, heads, d], this rank's
  ShardLayout layout;
  int32_t count = 0;
  const int64_t* chosen = nullptr;  // [count]: their positions; null: of one document
  bool spread = false;  // of one document: SpreadPosition's, else the last of the sequence
  __nv_bfloat16* queries = nullptr;  // [count, heads, d]; null: positions and budgets only
  int64_t* positions = nullptr;      // [count]
  float column_mass = 1.0f, diagonal_mass = 1.0f;
  int32_t max_columns = 0, max_diagonals = 0;
  float* masses = nullptr;        // [2, heads]: of columns, of diagonals
  int32_t* max_counts = nullptr;  // [2, heads]
};
absl::Status PrepareEstimate(const EstimateInputsArgs& args, cudaStream_t stream);

// A layer's counters of a step on the device, summed over its calls. Eight bytes each, then
// int64 owner_tiles[ranks]: tiles visited with each owner's keys.
struct LayerCounters {
  double recall;     // attention mass of the estimate queries that is kept
  double verticals;  // mean over heads
  double slashes;
  double verticals_at_budget;  // IndexMass's, mean over heads
  double slashes_at_budget;
  int64_t column_tiles;
  int64_t balanced;       // calls whose choice was moved (balance_steps.h)
  int64_t anchor_missed;  // of them: MissesAnchor
};
inline constexpr int kLayerCounters = sizeof(LayerCounters) / 8;

// Adds a vertical-slash selection to `counters` and `owner_tiles`. Recall is exact where the
// estimate queries lie in one block of the sequence, or of each document; else a column's mass
// counts by the share of queries that see it whose diagonals do not cover it, which can be far more
// than it is.
struct CountSelectionArgs {
  SelectArgs selected;                       // after Select
  int32_t estimate_queries = 0;              // none: recall is of diagonals alone
  const int64_t* query_positions = nullptr;  // [estimate_queries]
  // Both or none, as in IndexEstimateArgs and TileSelection: tiles that documents hide are not
  // counted.
  const int64_t* query_starts = nullptr;     // [estimate_queries]
  const int32_t* document_starts = nullptr;  // [n]
  LayerCounters* counters = nullptr;
  int64_t* owner_tiles = nullptr;
};
absl::Status CountSelection(const CountSelectionArgs& args, cudaStream_t stream);

// Adds the recall of a choice of blocks, the mean over heads of kept[head] of total[head].
absl::Status CountRecall(const int64_t* kept, const int64_t* total, int32_t heads,
                         LayerCounters* counters, cudaStream_t stream);

// *tiles += the length of the lists that end at row_offsets[heads * (query_tiles + 1)].
absl::Status CountListed(const int32_t* row_offsets, int64_t offsets, int64_t* tiles,
                         cudaStream_t stream);

// *tiles += TilesOfGroups of one owner's groups of `tiles_of`, in `rows` rows, for each head that
// has the row.
absl::Status CountGroups(const KeyGroups& groups, const SpreadRows& tiles_of,
                         const ShardLayout& queries, int64_t rows, int64_t* tiles,
                         cudaStream_t stream);

// Sums of local tiles of all ranks, [ranks, local_tiles, row], to the order of the sequence.
absl::Status OrderTileSums(const float* gathered, const ShardLayout& layout, int32_t tile,
                           int64_t row, float* ordered, cudaStream_t stream);

}  // namespace ringleader::kernels::index
