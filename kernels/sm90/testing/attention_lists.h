// What the tests of Hopper attention attend to: cases, and their lists of tiles on the host and the
// device, for the whole sequence and for each rank and owner of a ring.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/masks/masks.h"
#include "kernels/testing/device_buffer.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::sm90 {

inline std::mt19937& Random() {
  static std::mt19937 random = [] {
    const unsigned seed = std::random_device{}();
    ::testing::Test::RecordProperty("seed", static_cast<int>(seed));
    return std::mt19937(seed);
  }();
  return random;
}

// The tiles of a kCsr case.
enum class Listed {
  kRandom,  // one line in eight is empty, one full, the rest random
  kNone,
  kAll,
  kSingle,  // one tile of the whole matrix
  kDiagonal,
};

struct Case {
  std::string name;
  int64_t tokens = 0;
  int heads = 4, kv_heads = 2, head_dim = 128, tile = 128;
  TilePattern pattern = TilePattern::kCausal;
  Listed listed = Listed::kRandom;
  double density = 0.3;  // kToeplitz, Listed::kRandom
  int64_t window = 0;
  LayoutKind layout = LayoutKind::kContiguous;
  int ranks = 1, stripe = 0;
  bool documents = false;  // several, packed into the sequence
  bool chosen = false;     // kCsr: queries chose blocks of two tiles
  bool groups =
      false;  // kToeplitz, tiles of 64: groups of keys before each tile, `density` of them
  int heads_together = 1;             // that have the groups in common
  std::optional<MaskKind> mask = {};  // kFull, kCsr: as intervals of keys for each query
  bool any_intervals = false;         // the same without a mask: some queries see nothing

  ShardLayout LayoutOf(int rank) const {
    return {.kind = layout, .ranks = ranks, .rank = rank, .stripe = stripe, .tokens = tokens};
  }
};

inline void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

// kCsr's lists in both directions, in host memory and as copies.
struct TileLists {
  std::vector<int32_t> row_offsets, columns, column_offsets, rows;
  DeviceBuffer<int32_t> gpu_row_offsets, gpu_columns, gpu_column_offsets, gpu_rows;

  // listed(head, row, column) of `blocks` x `blocks` tiles.
  template <typename Predicate>
  TileLists(int heads, int64_t blocks, Predicate listed) {
    const auto fill = [&](bool by_row, std::vector<int32_t>& offsets, std::vector<int32_t>& list) {
      for (int h = 0; h < heads; ++h) {
        offsets.push_back(static_cast<int32_t>(list.size()));
        for (int64_t line = 0; line < blocks; ++line) {
          for (int64_t i = 0; i < blocks; ++i) {
            if (by_row ? listed(h, line, i) : listed(h, i, line)) {
              list.push_back(static_cast<int32_t>(i));
            }
          }
          offsets.push_back(static_cast<int32_t>(list.size()));
        }
      }
    };
    fill(true, row_offsets, columns);
    fill(false, column_offsets, rows);
    gpu_row_offsets = DeviceBuffer<int32_t>(row_offsets);
    gpu_columns = DeviceBuffer<int32_t>(columns);
    gpu_column_offsets = DeviceBuffer<int32_t>(column_offsets);
    gpu_rows = DeviceBuffer<int32_t>(rows);
  }
  void PointFrom(TileSelection& host, TileSelection& gpu) const {
    host.row_offsets = row_offsets.data();
    host.columns = columns.data();
    host.column_offsets = column_offsets.data();
    host.rows = rows.data();
    gpu.row_offsets = gpu_row_offsets.data();
    gpu.columns = gpu_columns.data();
    gpu.column_offsets = gpu_column_offsets.data();
    gpu.rows = gpu_rows.data();
  }
};

// TileSelection::document_starts of a whole sequence: a document of one token, one that ends with a
// tile, a long one, the rest of any length.
inline std::vector<int32_t> DocumentStarts(const Case& c) {
  const int32_t tokens = static_cast<int32_t>(c.tokens);
  std::vector<int32_t> cuts = {0, 1, std::min(c.tile, tokens - 1), tokens};
  std::uniform_int_distribution<int32_t> anywhere(tokens / 2, tokens - 1);
  for (int i = 0; i < 8; ++i) cuts.push_back(anywhere(Random()));
  std::sort(cuts.begin(), cuts.end());
  std::vector<int32_t> starts(c.tokens);
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    std::fill(starts.begin() + cuts[i], starts.begin() + cuts[i + 1], cuts[i]);
  }
  return starts;
}

// TileSelection::intervals of a whole sequence.
inline std::vector<KeyIntervals> IntervalsOf(const Case& c) {
  const auto tokens = static_cast<int32_t>(c.tokens);
  if (c.mask) {
    std::vector<int32_t> firsts = DocumentStarts(c);
    firsts.erase(std::unique(firsts.begin(), firsts.end()), firsts.end());
    const Mask mask = {
        .kind = *c.mask, .window = tokens / 6 + 1, .prefix = tokens / 7, .block = tokens / 9 + 1};
    return *kernels::IntervalsOf(mask, tokens, firsts);
  }
  std::vector<KeyIntervals> rows(c.tokens);
  std::uniform_int_distribution<int32_t> anywhere(0, tokens);
  for (int64_t i = 0; i < c.tokens; ++i) {
    if (i % 11 == 4 || (i >= 256 && i < 384)) continue;  // no key; a whole tile of such queries
    int32_t bounds[4];
    for (int32_t& bound : bounds) bound = anywhere(Random());
    std::sort(bounds, bounds + 4);
    rows[i] = {bounds[0], bounds[1], bounds[2], bounds[3]};
  }
  return rows;
}

class Lists {
 public:
  TileSelection host, gpu;  // of the whole sequence; documents are on the host, and in Of

  explicit Lists(const Case& c) : case_(c), blocks_((c.tokens + c.tile - 1) / c.tile) {
    host = {.pattern = c.pattern, .tile = c.tile, .window = c.window};
    std::bernoulli_distribution active(c.density);
    host.diagonal_words = static_cast<int32_t>((blocks_ + 63) / 64);
    for (int h = 0; h < c.heads; ++h) {
      for (int64_t delta = 0; delta < int64_t{host.diagonal_words} * 64; ++delta) {
        if (delta % 64 == 0) diagonals_.push_back(0);
        if (delta == 0 || (!c.groups && active(Random())))
          diagonals_.back() |= uint64_t{1} << (delta % 64);
      }
    }
    gpu_diagonals_ = DeviceBuffer<uint64_t>(diagonals_);
    gpu = host;
    host.diagonals = diagonals_.data();
    gpu.diagonals = gpu_diagonals_.data();
    if (c.documents) {
      starts_ = DocumentStarts(c);
      host.document_starts = starts_.data();
      for (int rank = 0; rank < c.ranks; ++rank) {
        const ShardLayout layout = c.LayoutOf(rank);
        std::vector<int32_t> local(layout.local_tokens());
        for (int64_t i = 0; i < layout.local_tokens(); ++i) local[i] = starts_[layout.Position(i)];
        gpu_starts_.emplace_back(local);
      }
    }
    if (c.groups) MakeGroups();
    if (c.mask || c.any_intervals) {
      intervals_ = IntervalsOf(c);
      host.intervals = intervals_.data();
      for (int rank = 0; rank < c.ranks; ++rank) {
        const ShardLayout layout = c.LayoutOf(rank);
        std::vector<KeyIntervals> local(layout.local_tokens());
        for (int64_t i = 0; i < layout.local_tokens(); ++i) {
          local[i] = intervals_[layout.Position(i)];
        }
        gpu_intervals_.emplace_back(local);
      }
    }
    if (c.pattern != TilePattern::kCsr) return;

    for (int64_t i = 0; i < c.heads * blocks_ * blocks_; ++i) {
      listed_.push_back(IsListed(i / blocks_ % blocks_, i % blocks_, active));
    }
    whole_.emplace_back(c.heads, blocks_, [&](int h, int64_t row, int64_t column) {
      return listed_[(h * blocks_ + row) * blocks_ + column];
    });
    whole_[0].PointFrom(host, gpu);
    if (c.chosen) MakeChoice();
    const int64_t local = blocks_ / c.ranks;
    for (int i = 0; c.ranks > 1 && i < c.ranks * c.ranks; ++i) {
      const ShardLayout query = c.LayoutOf(i / c.ranks), key = c.LayoutOf(i % c.ranks);
      pairs_.emplace_back(c.heads, local, [&](int h, int64_t row, int64_t column) {
        return listed_[(h * blocks_ + query.Position(row * c.tile) / c.tile) * blocks_ +
                       key.Position(column * c.tile) / c.tile];
      });
    }
  }

  // What rank's queries attend to of owner's keys.
  TileSelection Of(int rank, int owner) const {
    TileSelection on_host, on_gpu = gpu;
    if (case_.documents) on_gpu.document_starts = gpu_starts_[rank].data();
    if (case_.chosen) {
      on_gpu.choice = {gpu_chosen_[rank].data(), host.choice.block_size};
    }
    if (case_.groups) on_gpu.groups = groups_[rank].Of(owner);
    if (!gpu_intervals_.empty()) on_gpu.intervals = gpu_intervals_[rank].data();
    if (!pairs_.empty()) pairs_[rank * case_.ranks + owner].PointFrom(on_host, on_gpu);
    return on_gpu;
  }

 private:
  bool IsListed(int64_t row, int64_t column, std::bernoulli_distribution& active) const {
    switch (case_.listed) {
      case Listed::kRandom:
        return row % 8 != 5 && column % 8 != 3 && (row % 8 == 6 || active(Random()));
      case Listed::kNone:
        return false;
      case Listed::kAll:
        return true;
      case Listed::kSingle:
        return row == blocks_ - 1 && column == blocks_ / 2;
      case Listed::kDiagonal:
        return row == column;
    }
    return false;
  }

  // Words of queries that all, none or some of them chose a block.
  void MakeChoice() {
    const int64_t words = QueryWords(case_.tokens), block_size = int64_t{2} * case_.tile,
                  rows = case_.heads * ((case_.tokens + block_size - 1) / block_size);
    for (int64_t i = 0; i < rows * words; ++i) {
      const uint32_t draw = Random()();
      chosen_.push_back(draw % 8 == 0 ? 0 : draw % 8 == 1 ? ~0u : Random()());
    }
    host.choice = {chosen_.data(), static_cast<int32_t>(block_size)};
    for (int rank = 0; rank < case_.ranks; ++rank) {
      const ShardLayout layout = case_.LayoutOf(rank);
      const int64_t n = layout.local_tokens();
      std::vector<uint32_t> local(rows * QueryWords(n));
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < n; i += 32) {  // tiles are whole words
          local[row * QueryWords(n) + i / 32] = chosen_[row * words + layout.Position(i) / 32];
        }
      }
      gpu_chosen_.emplace_back(local);
    }
  }

  // KeyGroups of one rank's queries.
  struct RankGroups {
    int64_t rows = 0;
    int32_t capacity = 0, heads_together = 1;
    std::vector<int32_t> groups, bounds;  // [rows, capacity], [owners + 1, rows]
    DeviceBuffer<int32_t> gpu_groups, gpu_bounds;

    KeyGroups Of(int owner) const {
      return View(gpu_groups.data(), gpu_bounds.data() + owner * rows);
    }
    KeyGroups View(const int32_t* groups_at, const int32_t* begins) const {
      return {.groups = groups_at,
              .begins = begins,
              .ends = begins + rows,
              .capacity = capacity,
              .heads_together = heads_together};
    }
  };

  // A tile in four has none, one in four all, the others some of the groups before it.
  void MakeGroups() {
    std::bernoulli_distribution some(case_.density);
    const int64_t all = blocks_ * 64 / kGroupKeys;
    const int64_t rows = case_.heads / case_.heads_together * blocks_;
    std::vector<bool> listed(rows * all);
    for (int64_t row = 0; row < rows; ++row) {
      const uint32_t draw = Random()();
      for (int64_t g = 0; g < row % blocks_ * 64 / kGroupKeys; ++g) {
        listed[row * all + g] = draw % 4 == 1 || (draw % 4 > 1 && some(Random()));
      }
    }
    for (int rank = 0; rank < case_.ranks; ++rank) {
      groups_.push_back(GroupsOf(case_.LayoutOf(rank), listed, all));
    }
    whole_groups_ = GroupsOf({.tokens = case_.tokens}, listed, all);
    host.groups = whole_groups_.View(whole_groups_.groups.data(), whole_groups_.bounds.data());
  }

  RankGroups GroupsOf(const ShardLayout& query, const std::vector<bool>& listed,
                      int64_t all) const {
    const int64_t tiles = (query.local_tokens() + 63) / 64;
    RankGroups made;
    made.heads_together = case_.heads_together;
    made.rows = case_.heads / case_.heads_together * tiles;
    made.capacity = static_cast<int32_t>(all);
    made.groups.resize(made.rows * all);
    made.bounds.resize((query.ranks + 1) * made.rows);
    for (int64_t row = 0; row < made.rows; ++row) {
      const int64_t tile = query.Position(row % tiles * 64) / 64;
      const int64_t listed_row = (row / tiles * blocks_ + tile) * all;
      int32_t count = 0;
      for (int owner = 0; owner < query.ranks; ++owner) {
        ShardLayout key = query;
        key.rank = owner;
        made.bounds[owner * made.rows + row] = count;
        for (int64_t i = 0; i < key.local_tokens(); i += kGroupKeys) {
          if (listed[listed_row + key.Position(i) / kGroupKeys]) {
            made.groups[row * all + count++] = static_cast<int32_t>(i / kGroupKeys);
          }
        }
      }
      made.bounds[query.ranks * made.rows + row] = count;
    }
    made.gpu_groups = DeviceBuffer<int32_t>(made.groups);
    made.gpu_bounds = DeviceBuffer<int32_t>(made.bounds);
    return made;
  }

  const Case case_;
  const int64_t blocks_;
  std::vector<RankGroups> groups_;  // by rank
  RankGroups whole_groups_;
  std::vector<uint32_t> chosen_;                    // QueryChoice's, of the whole sequence
  std::vector<DeviceBuffer<uint32_t>> gpu_chosen_;  // by rank
  std::vector<uint64_t> diagonals_;
  DeviceBuffer<uint64_t> gpu_diagonals_;
  std::vector<int32_t> starts_;                            // [tokens]
  std::vector<DeviceBuffer<int32_t>> gpu_starts_;          // by rank: [local tokens]
  std::vector<KeyIntervals> intervals_;                    // [tokens]
  std::vector<DeviceBuffer<KeyIntervals>> gpu_intervals_;  // by rank: [local tokens]
  std::vector<bool> listed_;                               // [heads, blocks, blocks]
  std::vector<TileLists> whole_, pairs_;
};

}  // namespace ringleader::kernels::sm90
