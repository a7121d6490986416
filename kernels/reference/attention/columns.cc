#include "kernels/reference/attention/columns.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/reference/attention/passes.h"
#include "kernels/reference/tiles/document_starts.h"

namespace ringleader::kernels::reference {

namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Calls body(slot of the column in [heads, max_columns], its local index) for what `owner` has.
template <typename Body>
void ForOwnedColumns(const ShardLayout& owner, const ColumnSelection& columns, int head,
                     Body body) {
  for (int32_t c = 0; c < columns.counts[head]; ++c) {
    const int64_t slot = int64_t{head} * columns.max_columns + c;
    const int64_t position = columns.positions[slot];
    if (owner.Owner(position) == owner.rank) body(slot, owner.LocalIndex(position));
  }
}

// Which columns a tile of queries sees. Its queries would differ in the diagonal tile, which is
// always covered, and where a document starts within the tile: the columns before the tile are then
// seen by its leading rows alone.
class Visibility {
 public:
  Visibility(const ColumnSelection& columns, const TileSelection& tiles, const ShardLayout& layout,
             int64_t query_tokens)
      : columns_(columns), tiles_(tiles), layout_(layout), query_tokens_(query_tokens) {}

  struct QueryTile {
    int64_t block = 0;     // of the sequence
    int64_t document = 0;  // where the leading rows' document starts
    int rows = 0;
    int leading_rows = 0;
  };
  QueryTile At(int64_t index) const {
    const TileSpan span = SpanOfTile(layout_, query_tokens_, tiles_.tile, index);
    QueryTile tile{
        .block = span.first / tiles_.tile, .rows = span.tokens(), .leading_rows = span.tokens()};
    if (tiles_.document_starts != nullptr) {
      const int32_t* starts = tiles_.document_starts + index * tiles_.tile;
      tile.document = starts[0];
      tile.leading_rows =
          static_cast<int>(std::upper_bound(starts, starts + tile.rows, starts[0]) - starts);
    }
    return tile;
  }
  bool Sees(int head, const QueryTile& query, int32_t column) const {
    const int64_t position = columns_.positions[int64_t{head} * columns_.max_columns + column];
    const int64_t delta = query.block - position / tiles_.tile;
    if (delta <= 0 || position < query.document) return false;
    const uint64_t* words = tiles_.diagonals + int64_t{head} * tiles_.diagonal_words;
    return (words[delta / 64] >> (delta % 64) & 1) == 0;
  }

  // Tiles of columns that each query tile of the head sees any of.
  TileList ListOf(int head) const {
    TileList list;
    list.row_offsets.push_back(0);
    for (int64_t a = 0; a < TileCount(query_tokens_, tiles_.tile); ++a) {
      const QueryTile query = At(a);
      for (int32_t c = 0; c < columns_.counts[head];) {
        const int32_t b = c / tiles_.tile;
        if (Sees(head, query, c)) {
          list.columns.push_back(b);
          c = (b + 1) * tiles_.tile;
        } else {
          ++c;
        }
      }
      list.row_offsets.push_back(static_cast<int64_t>(list.columns.size()));
    }
    return list;
  }

  PairMask MaskOf(int head, int64_t query_tile, int64_t column_tile, float* bias) const {
    const QueryTile query = At(query_tile);
    const int32_t begin = static_cast<int32_t>(column_tile) * tiles_.tile;
    const int32_t end = std::min(begin + tiles_.tile, columns_.counts[head]);
    bool all = query.leading_rows == query.rows;
    for (int32_t c = begin; c < end; ++c) {
      const bool sees = Sees(head, query, c);
      bias[c - begin] = sees ? 0.0f : kNegativeInfinity;
      all &= sees;
    }
    if (all) return {};
    return {.kind = PairMask::Kind::kKeys, .bias = bias, .rows = query.leading_rows};
  }

 private:
  const ColumnSelection columns_;
  const TileSelection tiles_;
  const ShardLayout layout_;
  const int64_t query_tokens_;
};

template <typename Args>
absl::Status Check(const Args& args) {
  const TileSelection& tiles = args.tiles;
  const ColumnSelection& columns = args.columns;
  if (tiles.pattern != TilePattern::kToeplitz || tiles.diagonals == nullptr) {
    return absl::InvalidArgumentError("tiles: selected columns go with a Toeplitz selection");
  }
  if (columns.positions == nullptr || columns.counts == nullptr) {
    return absl::InvalidArgumentError("columns has no positions or counts");
  }
  if ((args.keys == nullptr || args.values == nullptr) && columns.max_columns > 0) {
    return absl::InvalidArgumentError("keys or values is null");
  }
  for (int head = 0; head < args.q.heads; ++head) {
    if (columns.counts[head] < 0 || columns.counts[head] > columns.max_columns) {
      return absl::InvalidArgumentError(
          absl::StrFormat("counts[%d] is %d; at most max_columns = %d are allowed", head,
                          columns.counts[head], columns.max_columns));
    }
  }
  return CheckDocuments(tiles, args.query_layout, args.q.tokens);
}

// Rows of columns as keys that every query head has for itself.
template <typename T>
TokenMajor<T> ColumnRows(T* data, const TokenMajor<const float>& q,
                         const ColumnSelection& columns) {
  return {.data = data,
          .tokens = columns.max_columns,
          .heads = q.heads,
          .head_dim = q.head_dim,
          .token_stride = q.head_dim,
          .head_stride = int64_t{columns.max_columns} * q.head_dim};
}

template <typename Args>
PassInputs InputsOf(const Args& args, const Visibility& visibility, std::vector<TileList>& lists) {
  PassInputs in{
      .q = args.q,
      .k = ColumnRows(args.keys, args.q, args.columns),
      .v = ColumnRows(args.values, args.q, args.columns),
      .tile = args.tiles.tile,
      .scale = args.scale,
      .key_tokens = std::vector<int64_t>(args.columns.counts, args.columns.counts + args.q.heads)};
  lists.resize(args.q.heads);
  for (int head = 0; head < args.q.heads; ++head) {
    lists[head] = visibility.ListOf(head);
    in.lists.push_back(&lists[head]);
  }
  in.mask = [&visibility](int head, int64_t a, int64_t b, float* bias) {
    return visibility.MaskOf(head, a, b, bias);
  };
  return in;
}

}  // namespace

void GatherColumns(const TokenMajor<const float>& k, const TokenMajor<const float>& v,
                   const ShardLayout& owner, const ColumnSelection& columns, int heads, float* keys,
                   float* values) {
  const int d = k.head_dim, group = heads / k.heads;
  for (int head = 0; head < heads; ++head) {
    ForOwnedColumns(owner, columns, head, [&](int64_t slot, int64_t i) {
      const int64_t kv_head = head / group;
      std::memcpy(keys + slot * d, k.data + i * k.token_stride + kv_head * k.head_stride,
                  d * sizeof(float));
      std::memcpy(values + slot * d, v.data + i * v.token_stride + kv_head * v.head_stride,
                  d * sizeof(float));
    });
  }
}

void ScatterColumns(const float* d_keys, const float* d_values, const ShardLayout& owner,
                    const ColumnSelection& columns, int heads, const TokenMajor<float>& dk,
                    const TokenMajor<float>& dv) {
  const int d = dk.head_dim, group = heads / dk.heads;
  for (int head = 0; head < heads; ++head) {
    ForOwnedColumns(owner, columns, head, [&](int64_t slot, int64_t i) {
      const int64_t kv_head = head / group;
      float* const k_row = dk.data + i * dk.token_stride + kv_head * dk.head_stride;
      float* const v_row = dv.data + i * dv.token_stride + kv_head * dv.head_stride;
      for (int x = 0; x < d; ++x) k_row[x] += d_keys[slot * d + x];
      for (int x = 0; x < d; ++x) v_row[x] += d_values[slot * d + x];
    });
  }
}

absl::Status ColumnForward(Engine& engine, const ColumnForwardArgs& args, int64_t* visited_tiles) {
  RETURN_IF_ERROR(Check(args));
  const Visibility visibility(args.columns, args.tiles, args.query_layout, args.q.tokens);
  std::vector<TileList> lists;
  const PassInputs in = InputsOf(args, visibility, lists);
  if (visited_tiles != nullptr) {
    *visited_tiles = 0;
    for (const TileList& list : lists) *visited_tiles += static_cast<int64_t>(list.columns.size());
  }
  ForwardPass(engine, in, args.out, args.lse);
  return absl::OkStatus();
}

absl::Status ColumnBackward(Engine& engine, const ColumnBackwardArgs& args) {
  RETURN_IF_ERROR(Check(args));
  const Visibility visibility(args.columns, args.tiles, args.query_layout, args.q.tokens);
  std::vector<TileList> lists;
  BackwardPass(engine, InputsOf(args, visibility, lists), args.d_out, args.lse, args.delta,
               {.dq = args.dq,
                .dk = ColumnRows(args.d_keys, args.q, args.columns),
                .dv = ColumnRows(args.d_values, args.q, args.columns)});
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::reference
