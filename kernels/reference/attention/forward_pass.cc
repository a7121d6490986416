#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/reference/attention/passes.h"
#include "kernels/reference/math/panels.h"

namespace ringleader::kernels::reference {

namespace {

// Keys and values that any list names, packed once and shared by all query tiles.
class PackedKeys {
 public:
  PackedKeys(Engine& engine, const PassInputs& in)
      : key_tiles_(in.key_tiles()),
        keys_size_(RoundUp(in.tile, engine.math().panel) * in.q.head_dim),
        size_(keys_size_ + in.tile * RoundUp(in.q.head_dim, engine.math().panel)) {
    std::vector<char> used(in.k.heads * key_tiles_, 0);
    for (int head = 0; head < in.q.heads; ++head) {
      char* const of_head = used.data() + head / in.group() * key_tiles_;
      for (const int32_t b : in.lists[head]->columns) of_head[b] = 1;
    }
    data_ = engine.shared_scratch().Reserve(in.k.heads * key_tiles_ * size_);
    engine.pool().For(in.k.heads * key_tiles_, [&](int64_t i, int) {
      if (!used[i]) return;
      const int head = static_cast<int>(i / key_tiles_), d = in.q.head_dim;
      const int64_t begin = i % key_tiles_ * in.tile;
      const int rows = in.KeyRows(head, i % key_tiles_), panel = engine.math().panel;
      PackTransposed(in.k.data + begin * in.k.token_stride + head * in.k.head_stride,
                     in.k.token_stride, rows, d, panel, data_ + i * size_);
      PackPanels(in.v.data + begin * in.v.token_stride + head * in.v.head_stride, in.v.token_stride,
                 rows, d, panel, data_ + i * size_ + keys_size_);
    });
  }

  KeyTile At(const PassInputs& in, int kv_head, int64_t b) const {
    const float* source = data_ + (kv_head * key_tiles_ + b) * size_;
    return {.tokens = in.KeyRows(kv_head, b),
            .d = in.q.head_dim,
            .keys_t = source,
            .values = source + keys_size_};
  }

 private:
  const int64_t key_tiles_, keys_size_, size_;
  float* data_;
};

}  // namespace

void ForwardPass(Engine& engine, const PassInputs& in, const TokenMajor<float>& out, float* lse) {
  const TileMath& math = engine.math();
  const PackedKeys packed(engine, in);
  const int heads = in.q.heads, d = in.q.head_dim;
  const int64_t d_padded = RoundUp(d, math.panel);

  // A task is a query tile of a head; the longest rows go first, so that threads end together.
  std::vector<int64_t> tasks(heads * in.query_tiles());
  std::iota(tasks.begin(), tasks.end(), 0);
  const auto length = [&](int64_t task) { return in.lists[task % heads]->RowLength(task / heads); };
  std::stable_sort(tasks.begin(), tasks.end(),
                   [&](int64_t x, int64_t y) { return length(x) > length(y); });
  engine.pool().For(static_cast<int64_t>(tasks.size()), [&](int64_t task, int worker) {
    if (length(tasks[task]) == 0) return;
    const int head = static_cast<int>(tasks[task] % heads);
    const int64_t a = tasks[task] / heads, begin = a * in.tile;
    const int rows = in.QueryRows(a);

    float* q = engine.worker_scratch(worker).Reserve(rows * (d + d_padded + 2) +
                                                     int64_t{kScoreRows + 1} * kMaxTile);
    ForwardState state{.rows = rows, .d_padded = static_cast<int>(d_padded), .q = q};
    float* const bias = q + int64_t{rows} * d;
    state.scores = bias + kMaxTile;
    state.out = state.scores + int64_t{kScoreRows} * kMaxTile;
    state.maximum = state.out + rows * d_padded;
    state.sum = state.maximum + rows;
    PackRows(in.q.data + begin * in.q.token_stride + head * in.q.head_stride, in.q.token_stride,
             rows, d, in.scale * kLog2E, q);
    std::fill(state.out, state.maximum, 0.0f);
    std::fill(state.maximum, state.sum, -std::numeric_limits<float>::infinity());
    std::fill(state.sum, state.sum + rows, 0.0f);

    const TileList& list = *in.lists[head];
    for (int64_t i = list.row_offsets[a]; i < list.row_offsets[a + 1]; ++i) {
      const int64_t b = list.columns[i];
      ForwardStep(math, state, packed.At(in, head / in.group(), b), in.mask(head, a, b, bias));
    }
    MergeRows(state, d, out.data + begin * out.token_stride + head * out.head_stride,
              out.token_stride, lse + head * in.q.tokens + begin);
  });
}

}  // namespace ringleader::kernels::reference
