// What one layer attends to in one step: chosen in forward, used again by backward. The same record
// for every device; its arrays lie in the device's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "patterns/index/device_array.h"
#include "patterns/index/sequence_documents.h"
#include "ring/band_tiles.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"
#include "ringleader/kernels/earlier_blocks.h"
#include "ringleader/kernels/seen_keys.h"
#include "ringleader/kernels/spread_rows.h"

namespace ringleader::patterns {

// Tiles of `query`'s queries and `key`'s keys that one head visits; the selection's document_starts
// and intervals are in the host's memory.
using TileCount = int64_t (*)(const kernels::TileSelection& tiles, const ring::Shard& query,
                              const ring::Shard& key);

// What a layer attends to where positions say all of it.
struct KnownKeys {
  int64_t window = 0;      // keys farther away take no part; 0: all that the mask shows do
  bool by_blocks = false;  // of these kFixedBlocks' alone
  bool operator==(const KnownKeys&) const = default;
};

struct LayerIndex {
  // PatternDefinition::count_tiles: null where the tiles are chosen online.
  TileCount count_tiles = nullptr;
  std::optional<KnownKeys> known;  // nullopt where the data chose
  kernels::TilePattern pattern = kernels::TilePattern::kCausal;
  int32_t tile = 128;
  int64_t window = 0;

  // Vertical-slash: block diagonals, and columns with the keys and values that are picked up as
  // their owners' keys go by.
  DeviceArray<uint64_t> diagonals;  // [heads, diagonal_words]
  int32_t diagonal_words = 0;
  DeviceArray<int64_t> column_positions;              // [heads, max_columns]
  DeviceArray<int32_t> column_counts;                 // [heads]
  int32_t max_columns = 0;                            // 0: the pattern has no columns
  DeviceArray<std::byte> column_keys, column_values;  // [heads, max_columns, d], of q's type

  // Blocks of block_size tokens that each tile of queries keeps
  // (ringleader/kernels/block_choice.h), from which the lists of a hop's tiles are built.
  DeviceArray<uint32_t> chosen;  // [heads, query tiles, words]
  // [heads, blocks, QueryWords(n)]: kernels::QueryChoice's, where each query chose for itself.
  DeviceArray<uint32_t> queries_chosen;
  kernels::EarlierBlocks earlier_blocks;  // what a head of queries_chosen holds
  int32_t block_size = 0;
  int32_t kept_blocks = 0;  // of a query tile, at most

  // Groups of keys beside the tiles of the block diagonals: kernels::ChosenGroups', from which the
  // lists of a hop are built.
  DeviceArray<uint32_t> groups_chosen;
  DeviceArray<int64_t> group_rows;
  int32_t most_groups = 0;     // of a query tile
  int32_t heads_together = 1;  // kernels::KeyGroups'
  // Whose tiles these are. Where they have fewer than 64 queries, the groups are attended to by
  // rows, the tiles of the block diagonals by queries, each from its own tile's first one on.
  kernels::SpreadRows group_tiles;
  DeviceArray<int32_t> own_starts;  // [n]: the position from which on; of spread tiles
  DeviceArray<int32_t> row_starts;  // document_starts by row; of spread tiles in documents

  std::shared_ptr<const DeviceDocuments> documents;  // null: one

  bool has_columns() const { return max_columns > 0; }
  const int32_t* document_starts() const {
    return documents == nullptr ? nullptr : documents->local_starts.data();
  }
  // What the mask shows where it is not causal; null where it is.
  const DeviceArray<kernels::KeyIntervals>* visible() const {
    if (documents == nullptr) return nullptr;
    const auto& rows = window > 0 ? documents->visible_in_window : documents->visible;
    return rows.size > 0 ? &rows : nullptr;
  }
  kernels::SeenKeys seen() const {
    return {.document_starts = document_starts(),
            .intervals = visible() == nullptr ? nullptr : visible()->data()};
  }
  // Returns the part that holds for all owners: without the lists of kCsr, and without groups.
  kernels::TileSelection Tiles() const {
    return {.pattern = pattern,
            .tile = tile,
            .window = window,
            .diagonals = diagonals.data(),
            .diagonal_words = diagonal_words,
            .choice = {.chosen = queries_chosen.data(), .block_size = block_size},
            .document_starts = seen().document_starts,
            .intervals = seen().intervals};
  }
  bool has_groups() const { return most_groups > 0; }
  kernels::ChosenGroups Groups() const {
    return {.rows = group_rows.data(),
            .chosen = groups_chosen.data(),
            .tile = group_tiles.tile,
            .heads_together = heads_together};
  }
  // Of spread tiles: what is attended to by queries, and what by rows.
  kernels::TileSelection OwnTiles() const {
    kernels::TileSelection tiles = Tiles();
    tiles.document_starts = own_starts.data();
    return tiles;
  }
  kernels::TileSelection RowTiles(const kernels::KeyGroups& groups) const {
    kernels::TileSelection tiles = Tiles();
    tiles.diagonals = nullptr;  // groups alone
    tiles.groups = groups;
    tiles.document_starts = row_starts.data();
    return tiles;
  }
  kernels::ColumnSelection Columns() const {
    return {.positions = column_positions.data(),
            .counts = column_counts.data(),
            .max_columns = max_columns};
  }
};

}  // namespace ringleader::patterns
