#include "kernels/ops/visit/visit.h"

#include <algorithm>

#include "ringleader/kernels/shares.h"

namespace ringleader::kernels::ops {

using torch::Tensor;

namespace {

constexpr int64_t kFewestWithDocuments = 32768;

// -1 in `sizes` fits any.
void CheckList(const char* name, const Tensor& list, const Tensor& q, torch::ScalarType type,
               std::vector<int64_t> sizes) {
  bool fits = list.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    if (sizes[i] < 0) sizes[i] = list.size(static_cast<int64_t>(i));
    fits = list.size(static_cast<int64_t>(i)) == sizes[i];
  }
  TORCH_CHECK(
      fits && list.scalar_type() == type && list.device() == q.device() && list.is_contiguous(),
      name, " must be dense, ", type, " ", sizes, " on ", q.device(), "; it is ",
      list.scalar_type(), " ", list.sizes(), " on ", list.device(),
      "; make blocks from tensors of this q's sizes and device");
}

// Lists of tiles in host memory: kernels read where they lead, and look for places in them.
// offsets: [batch, heads, tiles + 1].
void CheckTiles(const char* offsets_name, const Tensor& offsets, const char* listed_name,
                const Tensor& listed) {
  const int64_t tiles = offsets.size(2) - 1, capacity = listed.numel();
  const auto* const tile_at = listed.const_data_ptr<int32_t>();
  for (int64_t row = 0; row < offsets.size(0) * offsets.size(1) * tiles; ++row) {
    const int64_t head = row / tiles;
    const int32_t* const ends = offsets.const_data_ptr<int32_t>() + row + head;
    TORCH_CHECK(ends[0] >= 0 && ends[0] <= ends[1] && ends[1] <= capacity, offsets_name,
                " of head ", head, " of the batch, tile ", row % tiles, ", are ", ends[0], " and ",
                ends[1], "; they must ascend within [0, ", capacity, "], the elements of ",
                listed_name);
    for (int32_t i = ends[0]; i < ends[1]; ++i) {
      TORCH_CHECK(tile_at[i] >= 0 && tile_at[i] < tiles, listed_name, " has ", tile_at[i],
                  " for head ", head, " of the batch, tile ", row % tiles, "; there are ", tiles,
                  " tiles");
      TORCH_CHECK(i == ends[0] || tile_at[i] > tile_at[i - 1], listed_name, " has ", tile_at[i],
                  " after ", tile_at[i - 1], " for head ", head, " of the batch, tile ",
                  row % tiles, "; a tile's list must ascend");
    }
  }
}

// Columns in host memory. positions: [batch, heads, max_columns]; counts: [batch, heads].
void CheckColumns(const Tensor& positions, const Tensor& counts, int64_t tokens) {
  const int64_t most = positions.size(2);
  for (int64_t head = 0; head < counts.numel(); ++head) {
    const int64_t* const position = positions.const_data_ptr<int64_t>() + head * most;
    const int64_t count = counts.const_data_ptr<int32_t>()[head];
    TORCH_CHECK(count >= 0 && count <= most, "blocks.column_counts has ", count, " for head ", head,
                " of the batch; it must lie in [0, ", most, "], as many as there are positions");
    for (int64_t c = 0; c < count; ++c) {
      TORCH_CHECK(position[c] > (c == 0 ? -1 : position[c - 1]) && position[c] < tokens,
                  "blocks.column_positions has ", position[c], " for head ", head,
                  " of the batch; positions must ascend and lie in [0, ", tokens, "), q's tokens");
    }
  }
}

TilePattern PatternOf(int64_t pattern, size_t lists, int64_t size) {
  const auto known = static_cast<TilePattern>(pattern);
  switch (known) {
    case TilePattern::kFull:
    case TilePattern::kCausal:
    case TilePattern::kWindow:
      TORCH_CHECK(lists == 0, "blocks: ", lists, " lists for a pattern without any");
      TORCH_CHECK(known != TilePattern::kWindow || size > 0, "window is ", size,
                  "; it must be positive");
      return known;
    case TilePattern::kToeplitz:
      TORCH_CHECK(lists == 1 || lists == 3, "blocks: ", lists,
                  " lists for diagonals; there must be 1, or 3 with columns");
      return known;
    case TilePattern::kCsr:
      TORCH_CHECK(lists == 4 || lists == 5, "blocks: ", lists,
                  " lists for tiles; there must be 4, or 5 where queries chose");
      return known;
  }
  TORCH_CHECK(
      false, "pattern ", pattern,
      ": full (0), causal (1), window (2), diagonals (3), lists (4), lists without a mask (5) and "
      "key groups (6) are supported");
}

// The TilePattern that a pattern of the operators walks.
int64_t WalkedBy(int64_t pattern) {
  if (pattern == kUnmaskedLists) return static_cast<int64_t>(TilePattern::kCsr);
  return pattern == kKeyGroups ? static_cast<int64_t>(TilePattern::kToeplitz) : pattern;
}

}  // namespace

void CheckGroupDensity(double density) {
  TORCH_CHECK(density > 0 && density <= 1, "density is ", density, "; it must lie in (0, 1]");
}

AttentionSizes SizesOf(const Tensor& q, const Tensor& k) {
  TORCH_CHECK(q.dim() == 4, "q is ", q.sizes(), "; it must be [batch, heads, tokens, head_dim]");
  TORCH_CHECK(
      k.dim() == 4 && k.size(0) == q.size(0) && k.size(2) == q.size(2) && k.size(3) == q.size(3),
      "k is ", k.sizes(), "; with this q it must be [", q.size(0), ", kv_heads, ", q.size(2), ", ",
      q.size(3), "]: queries and keys are those of one sequence (no key-value cache)");
  TORCH_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "q has ", q.size(1), " heads and k ",
              k.size(1), "; the first must be a multiple of the second");
  TORCH_CHECK(q.size(1) > 0 && q.size(2) > 0, "q is ", q.sizes(),
              "; it must have heads and tokens");
  TORCH_CHECK(k.device() == q.device() && k.scalar_type() == q.scalar_type(), "k is ", k.toString(),
              " on ", k.device(), " and q ", q.toString(), " on ", q.device(),
              "; they must be alike");
  return {q.size(0), q.size(1), k.size(1), q.size(2), q.size(3)};
}

AttentionSizes SizesOf(const Tensor& q, const Tensor& k, const Tensor& v) {
  TORCH_CHECK(
      v.sizes() == k.sizes() && v.device() == k.device() && v.scalar_type() == k.scalar_type(),
      "v is ", v.toString(), " ", v.sizes(), " on ", v.device(), " and k ", k.toString(), " ",
      k.sizes(), " on ", k.device(), "; they must be alike");
  return SizesOf(q, k);
}

void CheckDocuments(const std::optional<Tensor>& documents, const Tensor& q,
                    const AttentionSizes& sizes) {
  if (!documents) return;
  CheckList("documents", *documents, q, torch::kInt, {sizes.batch, sizes.tokens});
}

const int32_t* StartsOf(const std::optional<Tensor>& documents, int64_t b) {
  if (!documents) return nullptr;
  return documents->const_data_ptr<int32_t>() + b * documents->size(1);
}

void CheckBlockSize(const char* name, int64_t block_size, int64_t tile) {
  TORCH_CHECK(block_size > 0 && block_size % tile == 0 && block_size <= kMostBlockTokens, name,
              " is ", block_size, "; it must be a multiple of the tile (", tile, ") and at most ",
              kMostBlockTokens);
}

Visit::Visit(const Tensor& q, const AttentionSizes& sizes, int64_t pattern, torch::TensorList lists,
             const std::optional<Tensor>& documents, const std::optional<Tensor>& intervals,
             int64_t tile, int64_t size, const KeptBlocks& kept)
    : sizes_(sizes),
      is_unmasked_(pattern == kUnmaskedLists),
      has_groups_(pattern == kKeyGroups),
      pattern_(PatternOf(WalkedBy(pattern), lists.size(), size)),
      lists_(lists.vec()),
      documents_(documents),
      intervals_(intervals),
      tile_(tile),
      size_(size),
      kept_(kept) {
  TORCH_CHECK(tile == 64 || tile == 128, "tile is ", tile, "; 64 and 128 are supported");
  CheckDocuments(documents, q, sizes);
  if (is_unmasked_) {
    TORCH_CHECK(
        lists.size() == 4 && !documents && !intervals,
        "lists without a mask go with nothing that hides keys: neither documents, intervals "
        "nor what queries chose; take the pattern of lists (4)");
    TORCH_CHECK(sizes.tokens % tile == 0, "lists without a mask need whole tiles; ", sizes.tokens,
                " tokens are none of ", tile, ": take the pattern of lists (4) with intervals");
  }
  if (intervals) {
    CheckList("intervals", *intervals, q, torch::kInt, {sizes.batch, sizes.tokens, 4});
  }
  const int64_t tiles = sizes.Tiles(tile), batch = sizes.batch, heads = sizes.heads;
  if (pattern_ == TilePattern::kToeplitz) {
    CheckList("blocks.diagonals", lists_[0], q, torch::kLong, {batch, heads, (tiles + 63) / 64});
    if (has_groups_) {
      CheckGroups(q);
      return;
    }
    if (lists_.size() == 1) return;
    CheckList("blocks.column_positions", lists_[1], q, torch::kLong, {batch, heads, -1});
    CheckList("blocks.column_counts", lists_[2], q, torch::kInt, {batch, heads});
    if (q.is_cpu()) CheckColumns(lists_[1], lists_[2], sizes.tokens);
  } else if (pattern_ == TilePattern::kCsr) {
    CheckList("blocks.row_offsets", lists_[0], q, torch::kInt, {batch, heads, tiles + 1});
    CheckList("blocks.columns", lists_[1], q, torch::kInt, {-1});
    CheckList("blocks.column_offsets", lists_[2], q, torch::kInt, {batch, heads, tiles + 1});
    CheckList("blocks.rows", lists_[3], q, torch::kInt, {-1});
    if (q.is_cpu()) {
      CheckTiles("blocks.row_offsets", lists_[0], "blocks.columns", lists_[1]);
      CheckTiles("blocks.column_offsets", lists_[2], "blocks.rows", lists_[3]);
    }
    if (lists_.size() == 4) return;
    CheckBlockSize("blocks.block_size", size, tile);
    CheckList("blocks.queries", lists_[4], q, torch::kInt,
              {batch, heads, sizes.Tiles(size), QueryWords(sizes.tokens)});
    TORCH_CHECK(kept.topk_blocks >= 0 && kept.density >= 0 && kept.density <= 1,
                "blocks.topk_blocks is ", kept.topk_blocks, " and blocks.density ", kept.density,
                "; they must not be negative, and the second at most 1");
  }
}

void Visit::CheckGroups(const Tensor& q) const {
  TORCH_CHECK(lists_.size() == 3 && tile_ == kGroupTile, "blocks: ", lists_.size(),
              " lists and a tile of ", tile_, " for key groups; there must be 3 of tiles of ",
              kGroupTile);
  CheckGroupDensity(kept_.density);
  const std::vector<int64_t> rows = GroupRows(sizes_.layout());
  CheckList("blocks.bits", lists_[1], q, torch::kInt,
            {sizes_.batch, sizes_.heads, GroupWords(sizes_)});
  CheckList("blocks.rows", lists_[2], q, torch::kLong, {static_cast<int64_t>(rows.size())});
  TORCH_CHECK(
      !q.is_cpu() || std::equal(rows.begin(), rows.end(), lists_[2].const_data_ptr<int64_t>()),
      "blocks.rows are not where the bits of ", sizes_.tokens,
      " tokens begin; take blocks as KeyGroups makes them");
}

ChosenGroups Visit::Groups(int64_t b) const {
  return {.rows = lists_[2].const_data_ptr<int64_t>(),
          .chosen = reinterpret_cast<const uint32_t*>(lists_[1].const_data_ptr<int32_t>()) +
                    b * lists_[1][0].numel()};
}

int32_t Visit::most_groups() const {
  const int64_t last = (sizes_.Tiles(kGroupTile) - 1) * kGroupTile;
  const KeyGroupBudget budget = KeyGroupBudgetOf(static_cast<float>(kept_.density), sizes_.tokens);
  return std::max<int32_t>(1, budget.MostGroups(last, 0));
}

TileSelection Visit::Tiles(int64_t b) const {
  TileSelection tiles = {.pattern = pattern_,
                         .tile = static_cast<int32_t>(tile_),
                         .document_starts = StartsOf(documents_, b)};
  if (intervals_) {
    tiles.intervals = reinterpret_cast<const KeyIntervals*>(intervals_->const_data_ptr<int32_t>()) +
                      b * sizes_.tokens;
  }
  if (pattern_ == TilePattern::kWindow) tiles.window = size_;
  if (pattern_ == TilePattern::kToeplitz) {
    const Tensor& diagonals = lists_[0];
    tiles.diagonal_words = static_cast<int32_t>(diagonals.size(2));
    tiles.diagonals = reinterpret_cast<const uint64_t*>(diagonals.const_data_ptr<int64_t>()) +
                      b * diagonals.size(1) * diagonals.size(2);
  } else if (pattern_ == TilePattern::kCsr) {
    const int64_t rows_of_batch = sizes_.heads * (sizes_.Tiles(tile_) + 1);
    tiles.row_offsets = lists_[0].const_data_ptr<int32_t>() + b * rows_of_batch;
    tiles.columns = lists_[1].const_data_ptr<int32_t>();
    tiles.column_offsets = lists_[2].const_data_ptr<int32_t>() + b * rows_of_batch;
    tiles.rows = lists_[3].const_data_ptr<int32_t>();
    if (lists_.size() == 5) {
      const Tensor& chosen = lists_[4];
      tiles.choice = {
          .chosen = reinterpret_cast<const uint32_t*>(chosen.const_data_ptr<int32_t>()) +
                    b * chosen[0].numel(),
          .block_size = static_cast<int32_t>(size_)};
    }
  }
  return tiles;
}

std::optional<QueryRowsPlan> Visit::Rows() const {
  const bool is_known = kept_.topk_blocks > 0 || kept_.density > 0;
  if (lists_.size() != 5 || intervals_ || !is_known) return std::nullopt;
  // With documents each head is gathered by itself: short sequences would wait for launches.
  if (documents_ && sizes_.tokens < kFewestWithDocuments) return std::nullopt;
  const auto tile = static_cast<int32_t>(tile_), block_size = static_cast<int32_t>(size_);
  const EarlierBlocks pairs =
      CountEarlierBlocks(sizes_.layout(), tile, block_size,
                         static_cast<int32_t>(std::min(kept_.topk_blocks, sizes_.Tiles(size_))),
                         ShareToRoundDown(kept_.density), /*is_moved=*/false);
  return PlanQueryRows(pairs, sizes_.Tiles(size_), tile, block_size,
                       static_cast<int32_t>(sizes_.heads), static_cast<int32_t>(sizes_.kv_heads),
                       documents_.has_value());
}

ColumnSelection Visit::Columns(int64_t b) const {
  if (max_columns() == 0) return {};
  return {.positions = lists_[1].const_data_ptr<int64_t>() + b * sizes_.heads * max_columns(),
          .counts = lists_[2].const_data_ptr<int32_t>() + b * sizes_.heads,
          .max_columns = static_cast<int32_t>(max_columns())};
}

}  // namespace ringleader::kernels::ops
