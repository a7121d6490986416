#include "kernels/reference/attention/attention.h"

#include <algorithm>
#include <span>
#include <vector>

#include "base/status_macros.h"
#include "kernels/reference/attention/arguments.h"
#include "kernels/reference/attention/passes.h"
#include "kernels/reference/tiles/key_intervals.h"

namespace ringleader::kernels::reference {

namespace {

// PairMask's bits of query tile `a` against keys from `first_key` on; null where all queries
// attend.
const uint32_t* SeenBy(const TileSelection& tiles, const ShardLayout& query, int head, int64_t a,
                       int64_t first_key) {
  const QueryChoice& choice = tiles.choice;
  if (choice.chosen == nullptr) return nullptr;
  const int64_t blocks = TileCount(query.tokens, choice.block_size);
  return choice.chosen +
         (head * blocks + first_key / choice.block_size) * QueryWords(query.local_tokens()) +
         a * tiles.tile / 32;
}

// PairMask's bits of query tile `a` against keys [first, first + tile) of the owner; all where the
// tile is the pattern's, which has no groups in it.
uint32_t GroupsOf(const TileSelection& tiles, int64_t query_tiles, int head, int64_t a,
                  int64_t first) {
  const KeyGroups& groups = tiles.groups;
  if (groups.groups == nullptr) return kAllGroups;
  const int64_t row = groups.RowOf(head, a, query_tiles), begin = first / kGroupKeys;
  const int32_t* const list = groups.groups + row * groups.capacity;
  const int32_t* const end = list + groups.ends[row];
  const int32_t* group = std::lower_bound(list + groups.begins[row], end, begin);
  uint32_t bits = 0;
  for (; group != end && *group < begin + kGroupTile / kGroupKeys; ++group) {
    bits |= 1u << (*group - begin);
  }
  return bits == 0 ? kAllGroups : bits;
}

template <typename Args>
PassInputs InputsOf(const Args& args, const TileLists& lists) {
  PassInputs in{.q = args.q,
                .k = args.k,
                .v = args.v,
                .tile = args.tiles.tile,
                .scale = args.scale,
                .key_tokens = std::vector<int64_t>(args.k.heads, args.k.tokens)};
  for (int head = 0; head < args.q.heads; ++head) in.lists.push_back(&lists.OfHead(head));
  in.mask = [&args, band = BandOf(args.tiles)](int head, int64_t a, int64_t b, float*) -> PairMask {
    const TileSpan query = SpanOfTile(args.query_layout, args.q.tokens, args.tiles.tile, a);
    const TileSpan key = SpanOfTile(args.key_layout, args.k.tokens, args.tiles.tile, b);
    if (args.tiles.intervals != nullptr) {
      const KeyIntervals* const rows = args.tiles.intervals + a * args.tiles.tile;
      if (SeesAll({rows, static_cast<size_t>(query.tokens())}, key)) return {};
      return {.kind = PairMask::Kind::kIntervals, .first_key = key.first, .intervals = rows};
    }
    const int32_t* starts = args.tiles.document_starts;
    if (starts != nullptr) starts += a * args.tiles.tile;
    // The last row's document is the last to start: where it holds every key, all rows see them.
    if (starts != nullptr && starts[query.tokens() - 1] <= key.first) starts = nullptr;
    const uint32_t* const seen_by = SeenBy(args.tiles, args.query_layout, head, a, key.first);
    const uint32_t groups = GroupsOf(args.tiles, TileCount(args.q.tokens, args.tiles.tile), head, a,
                                     b * args.tiles.tile);
    if (starts == nullptr && seen_by == nullptr && groups == kAllGroups &&
        band.Covers(query, key)) {
      return {};
    }
    return {.kind = PairMask::Kind::kBand,
            .band = band,
            .first_query = query.first,
            .first_key = key.first,
            .starts = starts,
            .seen_by = seen_by,
            .groups = groups};
  };
  return in;
}

}  // namespace

absl::Status AttentionForward(Engine& engine, const AttentionForwardArgs<float>& args,
                              int64_t* visited_tiles) {
  RETURN_IF_ERROR(CheckForward(args));
  ASSIGN_OR_RETURN(const TileLists lists,
                   TileLists::Build(args.tiles, args.query_layout, args.key_layout, args.q.tokens,
                                    args.k.tokens, args.q.heads));
  if (visited_tiles != nullptr) *visited_tiles = lists.TotalTiles();
  ForwardPass(engine, InputsOf(args, lists), args.out, args.lse);
  return absl::OkStatus();
}

absl::Status AttentionBackward(Engine& engine, const AttentionBackwardArgs<float>& args) {
  RETURN_IF_ERROR(CheckBackward(args));
  ASSIGN_OR_RETURN(const TileLists lists,
                   TileLists::Build(args.tiles, args.query_layout, args.key_layout, args.q.tokens,
                                    args.k.tokens, args.q.heads));
  BackwardPass(engine, InputsOf(args, lists), args.d_out, args.lse, args.delta,
               {.dq = args.dq, .dk = args.dk, .dv = args.dv});
  return absl::OkStatus();
}

void AttentionDelta(Engine& engine, const TokenMajor<const float>& d_out,
                    const TokenMajor<const float>& out, float* delta) {
  constexpr int64_t kTokens = 256;  // of a task
  engine.pool().For(TileCount(out.tokens, kTokens), [&](int64_t task, int) {
    const int64_t end = std::min(out.tokens, (task + 1) * kTokens);
    for (int64_t i = task * kTokens; i < end; ++i) {
      for (int head = 0; head < out.heads; ++head) {
        const float* x = d_out.data + i * d_out.token_stride + head * d_out.head_stride;
        const float* y = out.data + i * out.token_stride + head * out.head_stride;
        float sum = 0.0f;
        for (int k = 0; k < out.head_dim; ++k) sum += x[k] * y[k];
        delta[head * out.tokens + i] = sum;
      }
    }
  });
}

}  // namespace ringleader::kernels::reference
