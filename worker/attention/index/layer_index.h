// What one layer attends to in one step: chosen in forward, used again by backward.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/reference/tiles/block_topk.h"
#include "ringleader/kernels/attention.h"
#include "worker/attention/index/sequence_documents.h"

namespace ringleader::attention {

struct LayerIndex {
  kernels::TilePattern pattern = kernels::TilePattern::kCausal;
  int32_t tile = 128;
  int64_t window = 0;

  // Vertical-slash: block diagonals, and columns with the keys and values picked up on the ring.
  std::vector<uint64_t> diagonals;  // [heads, diagonal_words]
  int32_t diagonal_words = 0;
  std::vector<int64_t> column_positions;  // [heads, max_columns]
  std::vector<int32_t> column_counts;     // [heads]
  int32_t max_columns = 0;
  std::vector<float> column_keys, column_values;  // [heads, max_columns, d]

  std::vector<kernels::reference::TileCsr> owners;  // block top-k, by owner

  std::shared_ptr<const SequenceDocuments> documents;  // null: one

  kernels::TileSelection TilesOf(int owner) const {
    kernels::TileSelection tiles{.pattern = pattern, .tile = tile, .window = window};
    if (!diagonals.empty()) tiles.diagonals = diagonals.data();
    tiles.diagonal_words = diagonal_words;
    if (documents != nullptr) tiles.document_starts = documents->local_starts.data();
    if (!owners.empty()) {
      tiles.row_offsets = owners[owner].row_offsets.data();
      tiles.columns = owners[owner].columns.data();
    }
    return tiles;
  }
  kernels::ColumnSelection Columns() const {
    return {.positions = column_positions.data(),
            .counts = column_counts.data(),
            .max_columns = max_columns};
  }
};

}  // namespace ringleader::attention
