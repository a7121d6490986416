#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "base/status_macros.h"
#include "kernels/reference/arguments.h"
#include "kernels/reference/attention.h"
#include "kernels/reference/pack.h"
#include "kernels/reference/tile_lists.h"
#include "kernels/reference/tile_steps.h"

namespace ringleader::kernels::reference {

namespace {

// Whose turn it is to add to a query tile's dq. Key tiles are started in ascending order and wait
// for the lower ones only, so that the lowest one running never waits.
class Turnstile {
 public:
  void Await(int32_t turn) {
    for (int32_t now = turn_.load(std::memory_order_acquire); now != turn;
         now = turn_.load(std::memory_order_acquire)) {
      turn_.wait(now, std::memory_order_acquire);
    }
  }
  void Pass() {
    turn_.fetch_add(1, std::memory_order_release);
    turn_.notify_all();
  }

 private:
  std::atomic<int32_t> turn_{0};
};

// Offsets of a worker's buffers in its scratch memory.
struct Buffers {
  KeyTile key;
  float *keys_t, *values_t, *keys;
  float *q, *q_panels, *d_out, *d_out_panels;
  float *lse2, *dq, *dk, *dv;
  BackwardScratch scores;

  Buffers(Scratch& scratch, int tile, int d, int panel) {
    const int64_t padded = RoundUp(d, panel), columns = RoundUp(tile, panel);
    const int64_t rows_size = int64_t{tile} * d, panels_size = tile * padded;
    float* next = scratch.Reserve(2 * columns * d + 4 * panels_size + 2 * rows_size + tile +
                                  2 * columns * padded + 2 * kScoreRows * kMaxTile);
    const auto take = [&next](int64_t size) { return std::exchange(next, next + size); };
    scores.p = take(kScoreRows * kMaxTile);
    scores.dp = take(kScoreRows * kMaxTile);
    keys_t = take(columns * d);
    values_t = take(columns * d);
    keys = take(panels_size);
    q_panels = take(panels_size);
    d_out_panels = take(panels_size);
    dq = take(panels_size);
    dk = take(columns * padded);
    dv = take(columns * padded);
    q = take(rows_size);
    d_out = take(rows_size);
    lse2 = take(tile);
  }
};

void AddRows(const TileMath& math, int rows, int d, int64_t d_padded, float factor,
             const float* source, float* target, int64_t target_stride) {
  for (int i = 0; i < rows; ++i) {
    math.axpy(d, factor, source + i * d_padded, target + i * target_stride);
  }
}

}  // namespace

absl::Status AttentionBackward(Engine& engine, const AttentionBackwardArgs<float>& args) {
  RETURN_IF_ERROR(CheckBackward(args));
  const int heads = args.q.heads, kv_heads = args.k.heads, d = args.q.head_dim;
  const int group = heads / kv_heads, tile = args.tiles.tile;
  ASSIGN_OR_RETURN(const TileLists lists,
                   TileLists::Build(args.tiles, args.query_layout, args.key_layout, args.q.tokens,
                                    args.k.tokens, heads));
  const TileMath& math = engine.math();
  const int64_t query_tiles = TileCount(args.q.tokens, tile);
  const int64_t key_tiles = TileCount(args.k.tokens, tile);
  const int64_t d_padded = RoundUp(d, math.panel);
  std::vector<TransposedTileList> transposed(lists.shared() ? 1 : heads);
  engine.pool().For(static_cast<int64_t>(transposed.size()), [&](int64_t head, int) {
    transposed[head] = Transpose(lists.OfHead(static_cast<int>(head)), key_tiles);
  });
  const std::unique_ptr<Turnstile[]> turns(new Turnstile[heads * query_tiles]);
  const PositionBand band = BandOf(args.tiles);

  // A task is a key tile of a kv head with all the heads of its group: dk and dv stay with it.
  engine.pool().For(kv_heads * key_tiles, [&](int64_t task, int worker) {
    const int kv_head = static_cast<int>(task % kv_heads);
    const int64_t b = task / kv_heads, key_begin = b * tile;
    const TileSpan keys = SpanOfTile(args.key_layout, args.k.tokens, tile, b);
    Buffers buffers(engine.worker_scratch(worker), tile, d, math.panel);
    bool packed = false;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const TransposedTileList& list = transposed[lists.shared() ? 0 : head];
      for (int64_t i = list.column_offsets[b]; i < list.column_offsets[b + 1]; ++i) {
        if (!packed) {
          packed = true;
          const float* k =
              args.k.data + key_begin * args.k.token_stride + kv_head * args.k.head_stride;
          const float* v =
              args.v.data + key_begin * args.v.token_stride + kv_head * args.v.head_stride;
          PackTransposed(k, args.k.token_stride, keys.tokens(), d, math.panel, buffers.keys_t);
          PackTransposed(v, args.v.token_stride, keys.tokens(), d, math.panel, buffers.values_t);
          PackPanels(k, args.k.token_stride, keys.tokens(), d, math.panel, buffers.keys);
          std::fill_n(buffers.dk, keys.tokens() * d_padded, 0.0f);
          std::fill_n(buffers.dv, keys.tokens() * d_padded, 0.0f);
        }
        const int64_t a = list.rows[i], begin = a * tile;
        const TileSpan span = SpanOfTile(args.query_layout, args.q.tokens, tile, a);
        const int rows = span.tokens();
        const float* q = args.q.data + begin * args.q.token_stride + head * args.q.head_stride;
        const float* d_out =
            args.d_out.data + begin * args.d_out.token_stride + head * args.d_out.head_stride;
        PackRows(q, args.q.token_stride, rows, d, args.scale * kLog2E, buffers.q);
        PackPanels(buffers.q, d, rows, d, math.panel, buffers.q_panels);
        PackRows(d_out, args.d_out.token_stride, rows, d, 1.0f, buffers.d_out);
        PackPanels(buffers.d_out, d, rows, d, math.panel, buffers.d_out_panels);
        const float* lse = args.lse + head * args.q.tokens + begin;
        for (int row = 0; row < rows; ++row) {
          buffers.lse2[row] =
              std::isinf(lse[row]) ? std::numeric_limits<float>::infinity() : lse[row] * kLog2E;
        }
        PairMask mask;
        if (!band.Covers(span, keys)) {
          mask = {.kind = PairMask::Kind::kBand,
                  .band = band,
                  .first_query = span.first,
                  .first_key = keys.first};
        }
        BackwardStep(math,
                     {.rows = rows,
                      .q = buffers.q,
                      .q_panels = buffers.q_panels,
                      .d_out = buffers.d_out,
                      .d_out_panels = buffers.d_out_panels,
                      .lse2 = buffers.lse2,
                      .delta = args.delta + head * args.q.tokens + begin},
                     {.tokens = keys.tokens(),
                      .d = d,
                      .keys_t = buffers.keys_t,
                      .values_t = buffers.values_t,
                      .keys = buffers.keys},
                     mask, buffers.scores, buffers.dq, buffers.dk, buffers.dv);
        Turnstile& turn = turns[head * query_tiles + a];
        turn.Await(list.turns[i]);
        AddRows(math, rows, d, d_padded, args.scale, buffers.dq,
                args.dq.data + begin * args.dq.token_stride + head * args.dq.head_stride,
                args.dq.token_stride);
        turn.Pass();
      }
    }
    if (!packed) return;
    AddRows(math, keys.tokens(), d, d_padded, kLn2, buffers.dk,
            args.dk.data + key_begin * args.dk.token_stride + kv_head * args.dk.head_stride,
            args.dk.token_stride);
    AddRows(math, keys.tokens(), d, d_padded, 1.0f, buffers.dv,
            args.dv.data + key_begin * args.dv.token_stride + kv_head * args.dv.head_stride,
            args.dv.token_stride);
  });
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
