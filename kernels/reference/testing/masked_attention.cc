#include "kernels/reference/testing/masked_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace ringleader::kernels::reference::testing {
namespace {

// Of `n` numbers, in sums of their own that wait for each other at the end alone. The same terms
// always have the same sum: where a query sees one key, its gradient is zero to the bit.
template <typename T>
double Dot(const T* a, const float* b, int n) {
  constexpr int kSums = 8;
  double sums[kSums] = {};
  int x = 0;
  for (; x + kSums <= n; x += kSums) {
    for (int i = 0; i < kSums; ++i) sums[i] += double{a[x + i]} * b[x + i];
  }
  for (; x < n; ++x) sums[0] += double{a[x]} * b[x];
  return std::accumulate(sums, sums + kSums, 0.0);
}

void AddScaled(double factor, const float* from, int n, double* __restrict to) {
  for (int x = 0; x < n; ++x) to[x] += factor * from[x];
}

}  // namespace

Tensor RandomTensor(int64_t tokens, int heads, int head_dim, std::mt19937& random) {
  Tensor result(tokens, heads, head_dim);
  std::normal_distribution<float> normal;
  for (float& x : result.data) x = normal(random);
  return result;
}

Tensor Shard(const Tensor& whole, const ShardLayout& layout) {
  Tensor result(layout.local_tokens(), whole.heads, whole.head_dim);
  const int64_t row = int64_t{whole.heads} * whole.head_dim;
  for (int64_t i = 0; i < result.tokens; ++i) {
    std::copy_n(whole.data.begin() + layout.Position(i) * row, row, result.data.begin() + i * row);
  }
  return result;
}

MaskedAttention ComputeMaskedAttention(const Tensor& q, const Tensor& k, const Tensor& v,
                                       const Tensor& d_out, float scale, const Visible& visible) {
  const int d = q.head_dim, group = q.heads / k.heads;
  MaskedAttention result;
  result.out.assign(q.data.size(), 0.0);
  result.dq.assign(q.data.size(), 0.0);
  result.dk.assign(k.data.size(), 0.0);
  result.dv.assign(v.data.size(), 0.0);
  result.lse.assign(q.heads * q.tokens, -std::numeric_limits<double>::infinity());
  std::vector<double> p(k.tokens);
  std::vector<int64_t> keys;
  for (int head = 0; head < q.heads; ++head) {
    const int kv = head / group;
    for (int64_t i = 0; i < q.tokens; ++i) {
      keys.clear();
      double top = -std::numeric_limits<double>::infinity();
      for (int64_t j = 0; j < k.tokens; ++j) {
        if (!visible(head, i, j)) continue;
        keys.push_back(j);
        p[j] = Dot(q.row(i, head), k.row(j, kv), d) * scale;
        top = std::max(top, p[j]);
      }
      if (keys.empty()) continue;
      double sum = 0.0;
      for (const int64_t j : keys) sum += p[j] = std::exp(p[j] - top);
      result.lse[head * q.tokens + i] = top + std::log(sum);
      double* const out = &result.out[(i * q.heads + head) * d];
      for (const int64_t j : keys) {
        p[j] /= sum;
        AddScaled(p[j], v.row(j, kv), d, out);
      }
      if (d_out.tokens == 0) continue;
      const double delta = Dot(out, d_out.row(i, head), d);
      for (const int64_t j : keys) {
        const int64_t key_row = (j * k.heads + kv) * d;
        const double dp = Dot(d_out.row(i, head), v.row(j, kv), d);
        const double ds = p[j] * (dp - delta) * scale;
        AddScaled(p[j], d_out.row(i, head), d, &result.dv[key_row]);
        AddScaled(ds, q.row(i, head), d, &result.dk[key_row]);
        AddScaled(ds, k.row(j, kv), d, &result.dq[(i * q.heads + head) * d]);
      }
    }
  }
  return result;
}

double RelativeError(const std::vector<float>& actual, const std::vector<double>& expected) {
  double worst = 0.0, largest = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isinf(expected[i])) {
      if (actual[i] != expected[i]) return std::numeric_limits<double>::infinity();
      continue;
    }
    const double error = std::abs(actual[i] - expected[i]);
    if (!(error < std::numeric_limits<double>::infinity())) {
      return std::numeric_limits<double>::infinity();
    }
    worst = std::max(worst, error);
    largest = std::max(largest, std::abs(expected[i]));
  }
  return largest > 0.0 ? worst / largest : worst;
}

}  // namespace ringleader::kernels::reference::testing
