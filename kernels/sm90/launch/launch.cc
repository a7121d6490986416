#include "kernels/sm90/launch/launch.h"

#include <limits>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/sm90/walk/mask_memory.cuh"

namespace ringleader::kernels::sm90 {
namespace {

// Local tiles are whole, contiguous blocks of the sequence.
absl::Status CheckLayout(const char* name, const ShardLayout& layout, int64_t tokens, int32_t tile,
                         TilePattern pattern) {
  if (layout.ranks < 1 || layout.rank < 0 || layout.rank >= layout.ranks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: rank %d of %d ranks", name, layout.rank, layout.ranks));
  }
  if (layout.tokens <= 0 || layout.tokens >= int64_t{kMaxSequenceTokens}) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: %d tokens; 1 to %d are supported", name,
                                                      layout.tokens, kMaxSequenceTokens - 1));
  }
  // A rank may hold only the beginning of its part in stripes.
  const bool is_part = layout.ranks > 1 && layout.kind == LayoutKind::kStriped &&
                       pattern == TilePattern::kCausal && tokens < layout.local_tokens();
  if (layout.local_tokens() != tokens && !is_part) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: %d tokens on %d ranks, but the tensors hold %d", name, layout.tokens,
                        layout.ranks, tokens));
  }
  if (layout.ranks == 1) return absl::OkStatus();
  int64_t run = 0;  // tokens that are contiguous on a rank
  switch (layout.kind) {
    case LayoutKind::kContiguous:
      // Any boundary will do for position compares; block diagonals need whole blocks.
      run = pattern == TilePattern::kToeplitz ? layout.local_tokens() : tile;
      break;
    case LayoutKind::kZigzag:
      run = layout.tokens / (int64_t{2} * layout.ranks);
      break;
    case LayoutKind::kStriped:
      run = layout.stripe;
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: kind %d", name, static_cast<int>(layout.kind)));
  }
  if (run <= 0 || run % tile != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: runs of %d contiguous tokens are not whole tiles of %d; choose a "
                        "stripe, or pad the sequence",
                        name, run, tile));
  }
  const int64_t whole = layout.kind == LayoutKind::kZigzag ? int64_t{2} * layout.ranks
                        : layout.kind == LayoutKind::kStriped
                            ? int64_t{layout.ranks} * layout.stripe
                            : layout.ranks;
  if (layout.tokens % whole != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: %d tokens are not a multiple of %d; pad the sequence", name, layout.tokens, whole));
  }
  return absl::OkStatus();
}

absl::Status CheckIntervals(const AttentionShape& shape, const TileSelection& tiles) {
  if (tiles.pattern != TilePattern::kFull && tiles.pattern != TilePattern::kCsr) {
    return absl::InvalidArgumentError(
        "tiles.intervals goes with kFull, or with kCsr's lists of tiles");
  }
  if (tiles.document_starts != nullptr || tiles.choice.chosen != nullptr) {
    return absl::InvalidArgumentError(
        "tiles.intervals beside document_starts or choice; write the documents into the intervals");
  }
  const auto tiles_of = [&](int64_t tokens) {
    return static_cast<int32_t>((tokens + tiles.tile - 1) / tiles.tile);
  };
  const MaskMemory memory(static_cast<int32_t>(shape.query_tokens), tiles_of(shape.query_tokens),
                          tiles_of(shape.key_tokens));
  if (memory.by_column > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("tiles.intervals of %d queries and %d keys with tiles of %d tokens: too "
                        "many; give tiles of 128, or fewer tokens",
                        shape.query_tokens, shape.key_tokens, tiles.tile));
  }
  if (reinterpret_cast<uintptr_t>(tiles.intervals) % alignof(KeyIntervals) != 0) {
    return absl::InvalidArgumentError("tiles.intervals must be aligned to 16 bytes");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckShape(const AttentionShape& shape, const ShardLayout& query_layout,
                        const ShardLayout& key_layout, const TileSelection& tiles) {
  if (shape.head_dim != 64 && shape.head_dim != 128) {
    return absl::InvalidArgumentError(
        absl::StrFormat("q.head_dim is %d; 64 and 128 are supported", shape.head_dim));
  }
  if (shape.kv_heads < 1 || shape.heads < 1 || shape.heads % shape.kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("q.heads is %d and k.heads %d; the first must be a multiple of the second",
                        shape.heads, shape.kv_heads));
  }
  if (!(shape.scale > 0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("scale is %g; it must be positive", shape.scale));
  }
  if (tiles.tile != 64 && tiles.tile != 128) {
    return absl::InvalidArgumentError(
        absl::StrFormat("tiles.tile is %d; 64 and 128 are supported", tiles.tile));
  }
  if (tiles.document_starts != nullptr) {
    if (tiles.pattern == TilePattern::kFull) {
      return absl::InvalidArgumentError(
          "tiles.document_starts goes with causal patterns; kFull visits every pair");
    }
    if (reinterpret_cast<uintptr_t>(tiles.document_starts) % alignof(int32_t) != 0) {
      return absl::InvalidArgumentError("tiles.document_starts must be aligned to 4 bytes");
    }
  }
  if (tiles.intervals != nullptr) RETURN_IF_ERROR(CheckIntervals(shape, tiles));
  const QueryChoice& choice = tiles.choice;
  if (choice.chosen != nullptr &&
      (tiles.pattern != TilePattern::kCsr || choice.block_size < tiles.tile ||
       choice.block_size % tiles.tile != 0)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "tiles.choice of blocks of %d tokens goes with kCsr and blocks of whole tiles of %d",
        choice.block_size, tiles.tile));
  }
  const KeyGroups& groups = tiles.groups;
  if (groups.groups != nullptr) {
    if (tiles.pattern != TilePattern::kToeplitz || tiles.tile != 64) {
      return absl::InvalidArgumentError("tiles.groups goes with kToeplitz and tiles of 64 tokens");
    }
    if (groups.begins == nullptr || groups.ends == nullptr || groups.capacity < 1) {
      return absl::InvalidArgumentError(
          "tiles.groups: begins, ends or capacity is missing; see KeyGroups");
    }
    const int32_t together = groups.heads_together;
    if (together < 1 || together > 2 || shape.heads / shape.kv_heads % together != 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "tiles.groups.heads_together is %d with %d heads for each of k; 1, and 2 of an even "
          "number, are supported",
          together, shape.heads / shape.kv_heads));
    }
  }
  RETURN_IF_ERROR(
      CheckLayout("query_layout", query_layout, shape.query_tokens, tiles.tile, tiles.pattern));
  RETURN_IF_ERROR(
      CheckLayout("key_layout", key_layout, shape.key_tokens, tiles.tile, tiles.pattern));
  switch (tiles.pattern) {
    case TilePattern::kFull:
    case TilePattern::kCausal:
      break;
    case TilePattern::kWindow:
      if (tiles.window < 1 || tiles.window >= kMaxSequenceTokens) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "tiles.window is %d; 1 to %d are supported", tiles.window, kMaxSequenceTokens - 1));
      }
      break;
    case TilePattern::kToeplitz:
      if (groups.groups != nullptr && tiles.diagonals == nullptr) break;  // these alone
      if (tiles.diagonals == nullptr || tiles.diagonal_words < 1) {
        return absl::InvalidArgumentError(
            "tiles.diagonals is missing; kToeplitz needs a bitmap per head");
      }
      break;
    case TilePattern::kCsr:
      break;  // its lists differ by direction
    default:
      return absl::InvalidArgumentError(
          absl::StrFormat("tiles.pattern is %d; see TilePattern", static_cast<int>(tiles.pattern)));
  }
  return absl::OkStatus();
}

absl::Status CheckTensor(const char* name, const void* data, int64_t tokens, int32_t heads,
                         int32_t head_dim, int64_t expected_tokens, int32_t expected_heads,
                         int32_t expected_head_dim) {
  if (data == nullptr) return absl::InvalidArgumentError(absl::StrFormat("%s: data is null", name));
  if (tokens != expected_tokens || heads != expected_heads || head_dim != expected_head_dim) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is [%d, %d, %d]; it must be [%d, %d, %d]", name, tokens, heads,
                        head_dim, expected_tokens, expected_heads, expected_head_dim));
  }
  return absl::OkStatus();
}

absl::Status CheckColumns(const ColumnSelection& columns, int32_t heads, int32_t kv_heads) {
  if (columns.positions == nullptr || columns.counts == nullptr) {
    return absl::InvalidArgumentError("columns.positions or columns.counts is null");
  }
  if (columns.max_columns < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("columns.max_columns is %d; it must be positive", columns.max_columns));
  }
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%d query heads; they must be a multiple of the %d heads of k", heads, kv_heads));
  }
  return absl::OkStatus();
}

absl::StatusOr<AttentionShape> ColumnShape(const TokenMajor<const __nv_bfloat16>& q,
                                           const ColumnSelection& columns,
                                           const TileSelection& tiles,
                                           const ShardLayout& query_layout, float scale) {
  if (tiles.pattern != TilePattern::kToeplitz) {
    return absl::InvalidArgumentError(
        absl::StrFormat("tiles.pattern is %d; selected columns go with kToeplitz diagonals",
                        static_cast<int>(tiles.pattern)));
  }
  RETURN_IF_ERROR(CheckColumns(columns, q.heads, q.heads));
  AttentionShape shape = {.query_tokens = q.tokens,
                          .key_tokens = q.tokens,
                          .heads = q.heads,
                          .kv_heads = q.heads,
                          .head_dim = q.head_dim,
                          .scale = scale};
  RETURN_IF_ERROR(CheckShape(shape, query_layout, query_layout, tiles));
  shape.key_tokens = columns.max_columns;
  return shape;
}

absl::Status CheckDense(const char* name, const void* data) {
  if (data == nullptr || reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s must be a device pointer aligned to 16 bytes", name));
  }
  return absl::OkStatus();
}

absl::Status CheckWorkspace(const Workspace& workspace, int64_t needed_bytes) {
  if (workspace.data == nullptr || workspace.bytes < needed_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("workspace: %d bytes given, %d needed", workspace.bytes, needed_bytes));
  }
  if (reinterpret_cast<uintptr_t>(workspace.data) % 256 != 0) {
    return absl::InvalidArgumentError("workspace: data must be aligned to 256 bytes");
  }
  return absl::OkStatus();
}

TileWalk MakeTileWalk(const AttentionShape& shape, const ShardLayout& query_layout,
                      const ShardLayout& key_layout, const TileSelection& tiles, bool by_column) {
  TileWalk walk;
  walk.pattern = tiles.pattern;
  walk.tile_log2 = tiles.tile == 128 ? 7 : 6;
  walk.window = static_cast<int32_t>(tiles.window);
  walk.query_tokens = static_cast<int32_t>(shape.query_tokens);
  walk.key_tokens = static_cast<int32_t>(shape.key_tokens);
  walk.query_tiles = (walk.query_tokens + tiles.tile - 1) / tiles.tile;
  walk.key_tiles = (walk.key_tokens + tiles.tile - 1) / tiles.tile;
  walk.query_map = PositionMap::From(query_layout);
  walk.key_map = PositionMap::From(key_layout);
  walk.diagonals = tiles.diagonals;
  walk.diagonal_words = tiles.diagonal_words;
  if (tiles.choice.chosen != nullptr) walk.SetChoice(tiles.choice, query_layout.tokens);
  if (shape.mask_memory != nullptr) {
    const MaskMemory at(walk.query_tokens, walk.query_tiles, walk.key_tiles);
    walk.SetIntervals(shape.mask_memory, by_column ? at.by_column : at.by_row,
                      LineWords(by_column ? walk.query_tiles : walk.key_tiles));
  }
  walk.list_offsets = by_column ? tiles.column_offsets : tiles.row_offsets;
  walk.list_head = (by_column ? walk.key_tiles : walk.query_tiles) + 1;
  walk.list = by_column ? tiles.rows : tiles.columns;
  walk.document_starts = tiles.document_starts;
  return walk;
}

}  // namespace ringleader::kernels::sm90
