#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/reference/attention/passes.h"
#include "kernels/reference/math/panels.h"

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

// A worker's buffers, in its scratch memory.
struct Buffers {
  float *keys_t, *values_t, *keys;
  float *q, *q_panels, *d_out, *d_out_panels;
  float *lse2, *bias, *dq, *dk, *dv;
  BackwardScratch scores;

  Buffers(Scratch& scratch, int tile, int d, int panel) {
    const int64_t padded = RoundUp(d, panel), columns = RoundUp(tile, panel);
    const int64_t rows_size = int64_t{tile} * d, panels_size = tile * padded;
    float* next = scratch.Reserve(2 * columns * d + 4 * panels_size + 2 * rows_size + tile +
                                  2 * columns * padded + int64_t{2 * kScoreRows + 1} * kMaxTile);
    const auto take = [&next](int64_t size) { return std::exchange(next, next + size); };
    scores.p = take(int64_t{kScoreRows} * kMaxTile);
    scores.dp = take(int64_t{kScoreRows} * kMaxTile);
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
    bias = take(kMaxTile);
  }

  void LoadKeys(const float* k, int64_t stride, int count, int d, int panel) {
    PackTransposed(k, stride, count, d, panel, keys_t);
    PackPanels(k, stride, count, d, panel, keys);
  }
  void LoadValues(const float* v, int64_t stride, int count, int d, int panel) {
    PackTransposed(v, stride, count, d, panel, values_t);
  }
  void LoadQueries(const float* from, int64_t stride, int count, int d, int panel, float factor) {
    PackRows(from, stride, count, d, factor, q);
    PackPanels(q, d, count, d, panel, q_panels);
  }
  void LoadGradients(const float* from, int64_t stride, int count, int d, int panel) {
    PackRows(from, stride, count, d, 1.0f, d_out);
    PackPanels(d_out, d, count, d, panel, d_out_panels);
  }
  // Base 2; a row without keys gets probabilities of zero.
  void LoadLse(const float* lse, int count) {
    for (int i = 0; i < count; ++i) {
      lse2[i] = std::isinf(lse[i]) ? std::numeric_limits<float>::infinity() : lse[i] * kLog2E;
    }
  }
};

void AddRows(const TileMath& math, int rows, int d, int64_t d_padded, float factor,
             const float* source, float* target, int64_t target_stride) {
  for (int i = 0; i < rows; ++i) {
    math.axpy(d, factor, source + i * d_padded, target + i * target_stride);
  }
}

}  // namespace

void BackwardPass(Engine& engine, const PassInputs& in, const TokenMajor<const float>& d_out,
                  const float* lse, const float* delta, const BackwardOutputs& out) {
  const TileMath& math = engine.math();
  const int heads = in.q.heads, kv_heads = in.k.heads, d = in.q.head_dim;
  const int64_t key_tiles = in.key_tiles(), d_padded = RoundUp(d, math.panel);
  // Heads that share a list share its transpose.
  std::vector<TransposedTileList> transposed(heads);
  std::vector<const TransposedTileList*> columns(heads);
  engine.pool().For(heads, [&](int64_t head, int) {
    const auto first = std::find(in.lists.begin(), in.lists.end(), in.lists[head]);
    columns[head] = &transposed[first - in.lists.begin()];
    if (first - in.lists.begin() == head) transposed[head] = Transpose(**first, key_tiles);
  });
  const std::unique_ptr<Turnstile[]> turns(new Turnstile[heads * in.query_tiles()]);

  // A task is a key tile of a kv head with all the heads of its group: dk and dv stay with it.
  engine.pool().For(kv_heads * key_tiles, [&](int64_t task, int worker) {
    const int kv_head = static_cast<int>(task % kv_heads);
    const int64_t b = task / kv_heads, key_begin = b * in.tile;
    const int keys = in.KeyRows(kv_head, b);
    Buffers buffers(engine.worker_scratch(worker), in.tile, d, math.panel);
    bool packed = false;
    for (int head = kv_head * in.group(); head < (kv_head + 1) * in.group(); ++head) {
      const TransposedTileList& list = *columns[head];
      for (int64_t i = list.column_offsets[b]; i < list.column_offsets[b + 1]; ++i) {
        if (!packed) {
          packed = true;
          buffers.LoadKeys(in.k.data + key_begin * in.k.token_stride + kv_head * in.k.head_stride,
                           in.k.token_stride, keys, d, math.panel);
          buffers.LoadValues(in.v.data + key_begin * in.v.token_stride + kv_head * in.v.head_stride,
                             in.v.token_stride, keys, d, math.panel);
          std::fill_n(buffers.dk, keys * d_padded, 0.0f);
          std::fill_n(buffers.dv, keys * d_padded, 0.0f);
        }
        const int64_t a = list.rows[i], begin = a * in.tile;
        const int rows = in.QueryRows(a);
        const PairMask mask = in.mask(head, a, b, buffers.bias);
        buffers.LoadQueries(in.q.data + begin * in.q.token_stride + head * in.q.head_stride,
                            in.q.token_stride, rows, d, math.panel, in.scale * kLog2E);
        buffers.LoadGradients(d_out.data + begin * d_out.token_stride + head * d_out.head_stride,
                              d_out.token_stride, rows, d, math.panel);
        buffers.LoadLse(lse + head * in.q.tokens + begin, rows);
        BackwardStep(math,
                     {.rows = rows,
                      .q = buffers.q,
                      .q_panels = buffers.q_panels,
                      .d_out = buffers.d_out,
                      .d_out_panels = buffers.d_out_panels,
                      .lse2 = buffers.lse2,
                      .delta = delta + head * in.q.tokens + begin},
                     {.tokens = keys,
                      .d = d,
                      .keys_t = buffers.keys_t,
                      .values_t = buffers.values_t,
                      .keys = buffers.keys},
                     mask, buffers.scores, buffers.dq, buffers.dk, buffers.dv);
        Turnstile& turn = turns[head * in.query_tiles() + a];
        turn.Await(list.turns[i]);
        AddRows(math, rows, d, d_padded, in.scale, buffers.dq,
                out.dq.data + begin * out.dq.token_stride + head * out.dq.head_stride,
                out.dq.token_stride);
        turn.Pass();
      }
    }
    if (!packed) return;
    AddRows(math, keys, d, d_padded, kLn2, buffers.dk,
            out.dk.data + key_begin * out.dk.token_stride + kv_head * out.dk.head_stride,
            out.dk.token_stride);
    AddRows(math, keys, d, d_padded, 1.0f, buffers.dv,
            out.dv.data + key_begin * out.dv.token_stride + kv_head * out.dv.head_stride,
            out.dv.token_stride);
  });
}

}  // namespace ringleader::kernels::reference
