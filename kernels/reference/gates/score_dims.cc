#include "kernels/reference/gates/score_dims.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/reference/math/fused.h"
#include "ringleader/kernels/e4m3.h"

namespace ringleader::kernels::reference {
namespace {

bool IsFinite(float x) {
  return std::fabs(x) <= std::numeric_limits<float>::max();
}

// Sums up the heads of `x` that share a KV head.
void SumHead(const TokenMajor<const float>& x, int64_t rows, int first_head, int heads, float most,
             int64_t* energy, float* largest) {
  std::fill_n(energy, x.head_dim, int64_t{0});
  std::fill_n(largest, x.head_dim, 0.0f);
  for (int64_t i = 0; i < rows; ++i) {
    for (int head = first_head; head < first_head + heads; ++head) {
      const float* const row = x.data + i * x.token_stride + head * x.head_stride;
      for (int dim = 0; dim < x.head_dim; ++dim) {
        const float value = row[dim];
        if (!IsFinite(value)) continue;
        energy[dim] += std::llrint(std::min(value * value * std::ldexp(1.0f, kEnergyBits), most));
        largest[dim] = std::max(largest[dim], std::fabs(value));
      }
    }
  }
}

void NarrowRow(const float* row, int head_dim, const int32_t* dims, float inverse,
               uint8_t* narrow) {
  const bool is_finite = std::all_of(row, row + head_dim, IsFinite);
  for (int i = 0; i < kScoreDims; ++i) {
    const bool is_there = dims[i] >= 0;
    const float value =
        is_finite ? row[is_there ? dims[i] : 0] : std::numeric_limits<float>::quiet_NaN();
    narrow[i] = is_there ? ToE4m3(value * inverse) : 0;
  }
}

}  // namespace

void SumDimEnergy(Engine& engine, const TokenMajor<const float>& q,
                  const TokenMajor<const float>& k, const DimEnergyStep& step) {
  const int group = q.heads / k.heads;
  engine.pool().For(int64_t{2} * k.heads, [&](int64_t task, int) {
    const bool of_keys = task >= k.heads;
    const int kv_head = static_cast<int>(task % k.heads), heads = of_keys ? 1 : group;
    SumHead(of_keys ? k : q, step.rows, kv_head * heads, heads, MostEnergy(step.tokens * heads),
            step.energy + task * k.head_dim, step.largest + task * k.head_dim);
  });
}

void PickDims(int kv_heads, int head_dim, const PickDimsStep& step) {
  const int picked = std::min(head_dim, kScoreDims);
  for (int64_t head = 0; head < kv_heads; ++head) {
    const int64_t of_queries = head * head_dim, of_keys = (kv_heads + head) * head_dim;
    const auto product = [&](int dim) {
      return static_cast<double>(step.energy[of_queries + dim]) *
             static_cast<double>(step.energy[of_keys + dim]);
    };
    std::vector<int32_t> order(head_dim);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int x, int y) { return product(x) > product(y); });
    std::sort(order.begin(), order.begin() + picked);
    int32_t* const dims = step.dims + head * kScoreDims;
    std::fill(std::copy_n(order.begin(), picked, dims), dims + kScoreDims, -1);
    for (const int64_t side : {0, 1}) {
      const float* const largest = step.largest + (side == 0 ? of_queries : of_keys);
      float most = 0.0f;
      for (int i = 0; i < picked; ++i) most = std::max(most, largest[dims[i]]);
      step.inverses[side * kv_heads + head] =
          kScoreScaling * E4m3ScaleOf(std::bit_cast<uint32_t>(most)).inverse;
    }
  }
}

void NarrowRows(Engine& engine, const TokenMajor<const float>& q, const TokenMajor<const float>& k,
                const NarrowRowsStep& step) {
  const auto narrow = [&](const TokenMajor<const float>& x, const float* inverses,
                          const SpreadRows& spread, uint8_t* rows) {
    const int group = x.heads / k.heads;
    if (spread.is_spread())
      std::fill_n(rows, spread.Rows(x.tokens) * x.heads * kScoreDims, kE4m3Nan);
    engine.pool().For(x.tokens, [&](int64_t i, int) {
      for (int head = 0; head < x.heads; ++head) {
        NarrowRow(x.data + i * x.token_stride + head * x.head_stride, x.head_dim,
                  step.dims + int64_t{head / group} * kScoreDims, inverses[head / group],
                  rows + (spread.RowOf(i) * x.heads + head) * kScoreDims);
      }
    });
  };
  narrow(q, step.inverses, step.rows, step.queries);
  narrow(k, step.inverses + k.heads, {}, step.keys);
}

}  // namespace ringleader::kernels::reference
