#include "kernels/reference/attention/tile_steps.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/reference/math/panels.h"

namespace ringleader::kernels::reference {

namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// The end of the tile's keys that any of rows [begin, end) attends to.
int VisibleKeys(const PairMask& mask, int keys, int begin, int end) {
  if (mask.kind == PairMask::Kind::kKeys) return begin < mask.rows ? keys : 0;
  if (mask.kind == PairMask::Kind::kNone) return keys;
  if (mask.kind == PairMask::Kind::kIntervals) {
    int64_t visible = 0;
    for (int i = begin; i < end; ++i) {
      const KeyIntervals& row = mask.intervals[i];
      const int32_t last_end = row.second_end > row.second_begin ? row.second_end : row.end;
      visible = std::max(visible, last_end - mask.first_key);
    }
    return static_cast<int>(std::min<int64_t>(visible, keys));
  }
  if (mask.starts != nullptr && mask.starts[begin] - mask.first_key >= keys) return 0;
  const int64_t last = mask.first_query + end - 1 - mask.band.lowest - mask.first_key;
  return static_cast<int>(std::clamp<int64_t>(last + 1, 0, keys));
}

// scores[rows, columns], row 0 being query `begin` of the tile: -infinity where masked, and after
// the tile's last key.
void Mask(const PairMask& mask, int begin, int rows, int keys, int columns, float* scores) {
  for (int i = 0; i < rows; ++i, scores += kMaxTile) {
    int64_t low = 0, high = keys;  // visible: [low, high)
    if (mask.kind == PairMask::Kind::kIntervals) {
      // From the first interval's keys to the last one's, but for those between them.
      const KeyIntervals& row = mask.intervals[begin + i];
      const auto in_tile = [&](int32_t position) {
        return std::clamp<int64_t>(position - mask.first_key, 0, keys);
      };
      low = in_tile(row.begin);
      high = in_tile(row.second_end);
      std::fill(scores + in_tile(row.end), scores + in_tile(row.second_begin), kNegativeInfinity);
    } else if (mask.kind == PairMask::Kind::kBand) {
      const int64_t distance = mask.first_query + begin + i - mask.first_key;
      if (mask.band.highest != std::numeric_limits<int64_t>::max()) {
        low = std::clamp<int64_t>(distance - mask.band.highest, 0, keys);
      }
      if (mask.starts != nullptr) {
        low = std::clamp<int64_t>(mask.starts[begin + i] - mask.first_key, low, keys);
      }
      high = std::clamp<int64_t>(distance - mask.band.lowest + 1, low, keys);
      const int row = begin + i;
      if (mask.seen_by != nullptr && (mask.seen_by[row / 32] >> row % 32 & 1) == 0) low = high = 0;
    } else if (mask.kind == PairMask::Kind::kKeys) {
      if (begin + i >= mask.rows) high = 0;
      for (int j = 0; j < keys; ++j) scores[j] += mask.bias[j];
    }
    std::fill(scores, scores + low, kNegativeInfinity);
    std::fill(scores + high, scores + columns, kNegativeInfinity);
    if (mask.kind != PairMask::Kind::kBand || mask.groups == kAllGroups) continue;
    for (int j = 0; j < keys; ++j) {
      if ((mask.groups >> j / kGroupKeys & 1) == 0) scores[j] = kNegativeInfinity;
    }
  }
}

bool NeedsMask(const PairMask& mask, int keys, int columns) {
  return mask.kind != PairMask::Kind::kNone || keys != columns;
}

}  // namespace

void ForwardStep(const TileMath& math, const ForwardState& state, const KeyTile& key,
                 const PairMask& mask) {
  const int64_t values_stride = int64_t{key.tokens} * math.panel;
  for (int begin = 0; begin < state.rows; begin += kScoreRows) {
    const int rows = std::min(kScoreRows, state.rows - begin);
    const int keys = VisibleKeys(mask, key.tokens, begin, begin + rows);
    if (keys == 0) continue;
    const int columns = static_cast<int>(RoundUp(keys, math.panel));
    math.gemm(rows, columns, key.d, state.q + int64_t{begin} * key.d, key.d, 1, key.keys_t,
              int64_t{key.d} * math.panel, state.scores, kMaxTile, false);
    if (NeedsMask(mask, keys, columns)) Mask(mask, begin, rows, keys, columns, state.scores);
    float* out = state.out + int64_t{begin} * state.d_padded;
    math.softmax(rows, columns, state.scores, kMaxTile, state.maximum + begin, state.sum + begin,
                 out, state.d_padded);
    math.gemm(rows, state.d_padded, keys, state.scores, kMaxTile, 1, key.values, values_stride, out,
              state.d_padded, true);
  }
}

void MergeRows(const ForwardState& state, int d, float* out, int64_t out_stride, float* lse) {
  for (int i = 0; i < state.rows; ++i) {
    if (state.sum[i] == 0.0f) continue;  // a row with a key has at least 1, or NaN
    const float* row = state.out + int64_t{i} * state.d_padded;
    float* target = out + i * out_stride;
    const float added = (state.maximum[i] + std::log2(state.sum[i])) * kLn2;
    const float before = lse[i];
    if (before == kNegativeInfinity) {
      const float factor = 1.0f / state.sum[i];
      for (int k = 0; k < d; ++k) target[k] = row[k] * factor;
      lse[i] = added;
      continue;
    }
    const float top = std::max(before, added);
    const float merged = top + std::log1p(std::exp(std::min(before, added) - top));
    const float keep = std::exp(before - merged);
    const float factor = std::exp(added - merged) / state.sum[i];
    for (int k = 0; k < d; ++k) target[k] = target[k] * keep + row[k] * factor;
    lse[i] = merged;
  }
}

void BackwardStep(const TileMath& math, const BackwardQueries& queries, const KeyTile& key,
                  const PairMask& mask, const BackwardScratch& scratch, float* dq, float* dk,
                  float* dv) {
  const int d = key.d;
  const int64_t d_padded = RoundUp(d, math.panel);
  const int64_t transposed_stride = int64_t{d} * math.panel;
  const int64_t query_stride = int64_t{queries.rows} * math.panel;
  for (int begin = 0; begin < queries.rows; begin += kScoreRows) {
    const int rows = std::min(kScoreRows, queries.rows - begin);
    const int keys = VisibleKeys(mask, key.tokens, begin, begin + rows);
    float* dq_rows = dq + begin * d_padded;
    if (keys == 0) {
      std::fill(dq_rows, dq_rows + rows * d_padded, 0.0f);
      continue;
    }
    const int columns = static_cast<int>(RoundUp(keys, math.panel));
    math.gemm(rows, columns, d, queries.q + int64_t{begin} * d, d, 1, key.keys_t, transposed_stride,
              scratch.p, kMaxTile, false);
    math.gemm(rows, columns, d, queries.d_out + int64_t{begin} * d, d, 1, key.values_t,
              transposed_stride, scratch.dp, kMaxTile, false);
    if (NeedsMask(mask, keys, columns)) Mask(mask, begin, rows, keys, columns, scratch.p);
    math.softmax_gradient(rows, columns, scratch.p, scratch.dp, kMaxTile, queries.lse2 + begin,
                          queries.delta + begin);
    const int panels = math.panel * begin;
    math.gemm(keys, d_padded, rows, scratch.p, 1, kMaxTile, queries.d_out_panels + panels,
              query_stride, dv, d_padded, true);
    math.gemm(keys, d_padded, rows, scratch.dp, 1, kMaxTile, queries.q_panels + panels,
              query_stride, dk, d_padded, true);
    math.gemm(rows, d_padded, keys, scratch.dp, kMaxTile, 1, key.keys,
              int64_t{key.tokens} * math.panel, dq_rows, d_padded, false);
  }
}

}  // namespace ringleader::kernels::reference
