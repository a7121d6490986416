#include "kernels/reference/testing/key_group_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::reference::testing {

namespace {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

// The values that e4m3 has from 0 on; the i-th has the code i.
const std::vector<double>& E4m3Values() {
  static const auto values = [] {
    std::vector<double> all;
    all.reserve(128);
    for (int mantissa = 0; mantissa < 8; ++mantissa) all.push_back(mantissa * 0x1p-9);
    for (int exponent = -6; exponent <= 8; ++exponent) {
      for (int mantissa = 8; mantissa < 16; ++mantissa) {
        all.push_back(std::ldexp(mantissa, exponent - 3));
      }
    }
    all.pop_back();  // NaN
    return all;
  }();
  return values;
}

double RoundToE4m3(double x) {
  const std::vector<double>& values = E4m3Values();
  const double magnitude = std::min(std::abs(x), values.back());
  const int64_t above = std::ranges::lower_bound(values, magnitude) - values.begin();
  int64_t nearest = above;
  if (above > 0) {
    const double up = values[above] - magnitude, down = magnitude - values[above - 1];
    if (down < up || (down == up && above % 2 == 1)) nearest = above - 1;
  }
  return std::copysign(values[nearest], x);
}

const float* RowOf(const TokenMajor<const float>& x, int64_t token, int head) {
  return x.data + token * x.token_stride + head * x.head_stride;
}

// Returns, by dimension, the energies of heads [first, end), in units of 2^-kEnergyBits.
std::vector<int64_t> Energies(const TokenMajor<const float>& x, int first, int end) {
  const double most = std::exp2(62.0 - std::ceil(std::log2(x.tokens * (end - first))));
  std::vector<int64_t> energies(x.head_dim, 0);
  for (int64_t i = 0; i < x.tokens; ++i) {
    for (int head = first; head < end; ++head) {
      for (int dim = 0; dim < x.head_dim; ++dim) {
        const float value = RowOf(x, i, head)[dim];
        if (!std::isfinite(value)) continue;
        const float square = value * value;  // as devices have it
        energies[dim] += static_cast<int64_t>(
            std::nearbyint(std::min(std::ldexp(double{square}, kEnergyBits), most)));
      }
    }
  }
  return energies;
}

}  // namespace

std::vector<int> PickedDims(const TokenMajor<const float>& q, const TokenMajor<const float>& k,
                            int kv_head) {
  const int group = q.heads / k.heads;
  const auto of_queries = Energies(q, kv_head * group, (kv_head + 1) * group),
             of_keys = Energies(k, kv_head, kv_head + 1);
  std::vector<std::pair<double, int>> order;  // the first are picked
  order.reserve(k.head_dim);
  for (int dim = 0; dim < k.head_dim; ++dim) {
    order.emplace_back(-static_cast<double>(of_queries[dim]) * static_cast<double>(of_keys[dim]),
                       dim);
  }
  std::ranges::sort(order);
  std::vector<int> dims;
  for (const auto& [unused, dim] : order) {
    if (std::ssize(dims) < kScoreDims) dims.push_back(dim);
  }
  std::ranges::sort(dims);
  return dims;
}

std::vector<double> NarrowHeads(const TokenMajor<const float>& x, int first, int end,
                                const std::vector<int>& dims) {
  double largest = 0.0;
  const auto for_each = [&](const auto& take) {
    for (int head = first; head < end; ++head) {
      for (int64_t i = 0; i < x.tokens; ++i) take(RowOf(x, i, head));
    }
  };
  for_each([&](const float* row) {
    for (const int dim : dims) {
      if (std::isfinite(row[dim])) largest = std::max(largest, std::abs(double{row[dim]}));
    }
  });
  double scale = 1.0;  // the least power of two with which none is larger than 14
  while (largest > 0.0 && largest <= scale / 2 * 14.0) scale /= 2;
  while (largest > scale * 14.0) scale *= 2;
  std::vector<double> narrow;
  for_each([&](const float* row) {
    const bool is_finite =
        std::all_of(row, row + x.head_dim, [](float y) { return std::isfinite(y); });
    for (const int dim : dims) {
      narrow.push_back(is_finite ? scale * RoundToE4m3(row[dim] / scale)
                                 : std::numeric_limits<double>::quiet_NaN());
    }
  });
  return narrow;
}

KeyGroupOracle::KeyGroupOracle(const TokenMajor<const float>& q, const TokenMajor<const float>& k,
                               const KeyGroupGateStep& step, const std::vector<int32_t>& starts)
    : step_(step),
      starts_(starts),
      heads_(q.heads / step.heads_together),
      tokens_(q.tokens),
      tiles_((q.tokens + step.tile - 1) / step.tile),
      groups_((q.tokens + kGroupKeys - 1) / kGroupKeys),
      scores_(heads_ * tiles_ * groups_, kNegativeInfinity) {
  const int group = q.heads / k.heads;
  for (int kv_head = 0; kv_head < k.heads; ++kv_head) {
    const std::vector<int> dims = PickedDims(q, k, kv_head);
    const auto width = std::ssize(dims);
    const int first = kv_head * group;
    const std::vector<double> queries = NarrowHeads(q, first, first + group, dims),
                              keys = NarrowHeads(k, kv_head, kv_head + 1, dims);
    for (int head = first; head < first + group; ++head) {
      ScoreHead(head, queries.data() + (head - first) * tokens_ * width, keys.data(), width);
    }
  }
}

double KeyGroupOracle::Product(const double* query, const double* key, int64_t dims) {
  constexpr int64_t kAtOnce = 32;
  double sum = 0.0, lost = 0.0;
  for (int64_t first = 0; first < dims; first += kAtOnce) {
    double largest = std::abs(sum);
    const int64_t end = std::min(dims, first + kAtOnce);
    for (int64_t x = first; x < end; ++x) {
      sum += query[x] * key[x];
      largest = std::max(largest, std::abs(query[x] * key[x]));
    }
    lost += 0x1p-13 * static_cast<double>(end - first + 1) * largest + 0x1p-11 * std::abs(sum);
  }
  most_product_ = std::max(most_product_, std::abs(sum));
  if (lost > most_lost_) most_lost_ = lost;
  return sum;
}

int32_t KeyGroupOracle::Kept(int head, int64_t tile, bool is_moved) const {
  const int64_t first = tile * step_.tile, start = StartOf(first);
  KeyGroupBudget budget = step_.budget();
  if (!is_moved) budget.move = 1.0f;
  const int32_t most = budget.MostGroups(first, start);
  const int64_t first_head = int64_t{head} * step_.heads_together;
  const int32_t halves = step_.head_halves == nullptr ? 2 : step_.head_halves[first_head];
  if (halves == 1) return most - most / 2;
  if (halves != 3) return most;
  return static_cast<int32_t>(
      std::min<int64_t>(most + most / 2, (first - start + kGroupKeys - 1) / kGroupKeys));
}

void KeyGroupOracle::ScoreHead(int head, const double* queries, const double* keys, int64_t dims) {
  std::vector<double> logits(tokens_);
  for (int64_t i = 0; i < tokens_; ++i) {
    const int64_t tile = i / step_.tile, first = tile * step_.tile;
    const bool is_sampled = IsSampled(head / step_.heads_together, tile);
    double reference = kNegativeInfinity;
    for (int64_t j = StartOf(i); j <= i; ++j) {
      logits[j] = double{step_.scale} * Product(queries + i * dims, keys + j * dims, dims);
      const bool counts =
          !is_sampled || j >= first || j == SampleKey(static_cast<int32_t>(j / kSampleEvery));
      if (counts && logits[j] > reference) reference = logits[j];
    }
    for (int64_t j = StartOf(i); j < first; ++j) {
      double& score =
          scores_[(head / step_.heads_together * tiles_ + tile) * groups_ + j / kGroupKeys];
      if (logits[j] - reference > score) score = std::min(logits[j] - reference, 0.0);
    }
  }
}

double KeyGroupOracle::ShareSampled() const {
  int64_t sampled = 0;
  for (int head = 0; head < heads_; ++head) {
    for (int64_t tile = 0; tile < tiles_; ++tile) sampled += IsSampled(head, tile) ? 1 : 0;
  }
  return static_cast<double>(sampled) / static_cast<double>(heads_ * tiles_);
}

std::string KeyGroupOracle::Complaint(int head, int64_t tile, const std::vector<int64_t>& kept,
                                      double tolerance) const {
  const auto where = [&](int64_t group, const char* what) {
    return absl::StrFormat("head %d, tile %d: group %d %s", head, tile, group, what);
  };
  const int64_t first = tile * step_.tile, start = StartOf(first);
  const int32_t most = Kept(head, tile, /*is_moved=*/true);
  if (std::ssize(kept) != most) {
    return absl::StrFormat("head %d, tile %d: keeps %d groups, not %d", head, tile, kept.size(),
                           most);
  }
  // Whether x goes before y by what it scores and where ties go.
  const auto is_better = [&](int64_t x, int64_t y) {
    const double of_x = Score(head, tile, x), of_y = Score(head, tile, y);
    if (of_x != of_y) return of_x > of_y;
    return TiesGoLate(head) ? x > y : x < y;
  };
  int64_t worst_kept = -1, best_left = -1;
  for (int64_t group = 0; group < groups_; ++group) {
    const bool is_kept = std::ranges::binary_search(kept, group);
    if (group < start / kGroupKeys || (group + 1) * kGroupKeys > first) {
      if (is_kept) return where(group, "is not seen and kept");
    } else if (is_kept) {
      if (worst_kept < 0 || is_better(worst_kept, group)) worst_kept = group;
    } else if (best_left < 0 || is_better(group, best_left)) {
      best_left = group;
    }
  }
  if (worst_kept < 0 || best_left < 0 || is_better(worst_kept, best_left)) return "";
  const double difference = Score(head, tile, best_left) - Score(head, tile, worst_kept);
  if (tolerance > 0.0 && difference <= tolerance) return "";
  return where(best_left, "is left, a worse one is kept");
}

std::string KeyGroupOracle::Complaint(const std::vector<uint32_t>& chosen,
                                      const ShardLayout& layout, double tolerance) const {
  const int32_t queries = step_.tile;
  const std::vector<int64_t> rows = GroupRows(layout, queries);
  if (std::ssize(chosen) != heads_ * rows.back()) {
    return absl::StrFormat("%d words, not %d", chosen.size(), heads_ * rows.back());
  }
  for (int head = 0; head < heads_; ++head) {
    for (int64_t tile = 0; tile + 1 < std::ssize(rows); ++tile) {
      std::string wrong = Complaint(head, layout.Position(tile * queries) / queries,
                                    GroupsOfRow(chosen, layout, head, tile, queries), tolerance);
      if (!wrong.empty()) return wrong;
    }
  }
  return "";
}

std::vector<int64_t> GroupsOfRow(const std::vector<uint32_t>& chosen, const ShardLayout& layout,
                                 int head, int64_t tile, int32_t queries) {
  const std::vector<int64_t> rows = GroupRows(layout, queries);
  std::vector<int64_t> kept;
  const int64_t first = head * rows.back() + rows.at(tile), words = rows.at(tile + 1) - rows[tile];
  for (int64_t group = 0; group < words * 32; ++group) {
    if ((chosen.at(first + group / 32) >> group % 32 & 1) != 0) kept.push_back(group);
  }
  return kept;
}

}  // namespace ringleader::kernels::reference::testing
