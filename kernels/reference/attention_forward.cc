#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "base/status_macros.h"
#include "kernels/reference/arguments.h"
#include "kernels/reference/attention.h"
#include "kernels/reference/pack.h"
#include "kernels/reference/tile_lists.h"
#include "kernels/reference/tile_steps.h"

namespace ringleader::kernels::reference {

absl::Status AttentionForward(Engine& engine, const AttentionForwardArgs<float>& args,
                              int64_t* visited_tiles) {
  RETURN_IF_ERROR(CheckForward(args));
  const int heads = args.q.heads, kv_heads = args.k.heads, d = args.q.head_dim;
  const int group = heads / kv_heads, tile = args.tiles.tile;
  ASSIGN_OR_RETURN(const TileLists lists,
                   TileLists::Build(args.tiles, args.query_layout, args.key_layout, args.q.tokens,
                                    args.k.tokens, heads));
  if (visited_tiles != nullptr) *visited_tiles = lists.TotalTiles();
  const TileMath& math = engine.math();
  const int64_t query_tiles = TileCount(args.q.tokens, tile);
  const int64_t key_tiles = TileCount(args.k.tokens, tile);

  // Keys and values that any list names are packed once and shared by all query tiles.
  std::vector<char> used(kv_heads * key_tiles, 0);
  for (int head = 0; head < heads; ++head) {
    for (const int32_t b : lists.OfHead(head).columns) used[head / group * key_tiles + b] = 1;
    if (lists.shared()) {
      for (int g = 1; g < kv_heads; ++g) {
        std::copy_n(used.begin(), key_tiles, used.begin() + g * key_tiles);
      }
      break;
    }
  }
  const int64_t d_padded = RoundUp(d, math.panel);
  const int64_t keys_size = RoundUp(tile, math.panel) * d, values_size = tile * d_padded;
  float* packed = engine.shared_scratch().Reserve(kv_heads * key_tiles * (keys_size + values_size));
  engine.pool().For(kv_heads * key_tiles, [&](int64_t i, int) {
    if (!used[i]) return;
    const int64_t head = i / key_tiles, begin = i % key_tiles * tile;
    const int tokens = static_cast<int>(std::min<int64_t>(tile, args.k.tokens - begin));
    float* target = packed + i * (keys_size + values_size);
    PackTransposed(args.k.data + begin * args.k.token_stride + head * args.k.head_stride,
                   args.k.token_stride, tokens, d, math.panel, target);
    PackPanels(args.v.data + begin * args.v.token_stride + head * args.v.head_stride,
               args.v.token_stride, tokens, d, math.panel, target + keys_size);
  });

  // A task is a query tile of a head; the longest rows go first, so that threads end together.
  std::vector<int64_t> tasks(heads * query_tiles);
  std::iota(tasks.begin(), tasks.end(), 0);
  std::stable_sort(tasks.begin(), tasks.end(), [&](int64_t x, int64_t y) {
    return lists.OfHead(x % heads).RowLength(x / heads) >
           lists.OfHead(y % heads).RowLength(y / heads);
  });
  const PositionBand band = BandOf(args.tiles);
  engine.pool().For(static_cast<int64_t>(tasks.size()), [&](int64_t task, int worker) {
    const int head = static_cast<int>(tasks[task] % heads);
    const int64_t a = tasks[task] / heads, begin = a * tile;
    const TileList& list = lists.OfHead(head);
    if (list.RowLength(a) == 0) return;
    const TileSpan span = SpanOfTile(args.query_layout, args.q.tokens, tile, a);
    const int rows = span.tokens();

    float* q =
        engine.worker_scratch(worker).Reserve(rows * (d + d_padded + 2) + kScoreRows * kMaxTile);
    ForwardState state{.rows = rows, .d_padded = static_cast<int>(d_padded), .q = q};
    state.scores = q + rows * d;
    state.out = state.scores + kScoreRows * kMaxTile;
    state.maximum = state.out + rows * d_padded;
    state.sum = state.maximum + rows;
    PackRows(args.q.data + begin * args.q.token_stride + head * args.q.head_stride,
             args.q.token_stride, rows, d, args.scale * kLog2E, q);
    std::fill(state.out, state.maximum, 0.0f);
    std::fill(state.maximum, state.sum, -std::numeric_limits<float>::infinity());
    std::fill(state.sum, state.sum + rows, 0.0f);

    for (int64_t i = list.row_offsets[a]; i < list.row_offsets[a + 1]; ++i) {
      const int64_t b = list.columns[i];
      const TileSpan keys = SpanOfTile(args.key_layout, args.k.tokens, tile, b);
      const float* source = packed + (head / group * key_tiles + b) * (keys_size + values_size);
      const KeyTile key{
          .tokens = keys.tokens(), .d = d, .keys_t = source, .values = source + keys_size};
      PairMask mask;
      if (!band.Covers(span, keys)) {
        mask = {.kind = PairMask::Kind::kBand,
                .band = band,
                .first_query = span.first,
                .first_key = keys.first};
      }
      ForwardStep(math, state, key, mask);
    }
    MergeRows(state, d, args.out.data + begin * args.out.token_stride + head * args.out.head_stride,
              args.out.token_stride, args.lse + head * args.q.tokens + begin);
  });
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::reference
