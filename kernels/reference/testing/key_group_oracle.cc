#include "kernels/reference/testing/key_group_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::reference::testing {

namespace {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

}  // namespace

KeyGroupOracle::KeyGroupOracle(const TokenMajor<const float>& q, const TokenMajor<const float>& k,
                               const KeyGroupGateStep& step, const std::vector<int32_t>& starts)
    : step_(step),
      starts_(starts),
      heads_(q.heads),
      tokens_(q.tokens),
      tiles_((q.tokens + kGroupTile - 1) / kGroupTile),
      groups_((q.tokens + kGroupKeys - 1) / kGroupKeys),
      scores_(heads_ * tiles_ * groups_, kNegativeInfinity) {
  std::vector<double> logits(tokens_);
  for (int head = 0; head < heads_; ++head) {
    for (int64_t i = 0; i < tokens_; ++i) {
      const float* const query = q.data + i * q.token_stride + head * q.head_stride;
      double top = kNegativeInfinity;
      for (int64_t j = StartOf(i); j <= i; ++j) {
        const float* const key =
            k.data + j * k.token_stride + head / (heads_ / k.heads) * k.head_stride;
        double sum = 0.0;
        for (int x = 0; x < q.head_dim; ++x) sum += double{query[x]} * double{key[x]};
        logits[j] = double{step.scale} * sum;
        top = std::max(top, logits[j]);
      }
      const int64_t tile = i / kGroupTile;
      for (int64_t j = StartOf(i); j < tile * kGroupTile; ++j) {
        double& score = scores_[(head * tiles_ + tile) * groups_ + j / kGroupKeys];
        score = std::max(score, logits[j] - top);
      }
    }
  }
}

std::string KeyGroupOracle::Complaint(int head, int64_t tile, const std::vector<int64_t>& kept,
                                      double tolerance) const {
  const auto where = [&](int64_t group, const char* what) {
    return absl::StrFormat("head %d, tile %d: group %d %s", head, tile, group, what);
  };
  const int64_t first = tile * kGroupTile, start = StartOf(first);
  const int32_t most = step_.budget().MostGroups(first, start);
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

std::string KeyGroupOracle::Complaint(const std::vector<int32_t>& groups,
                                      const std::vector<int32_t>& bounds, int32_t capacity,
                                      const ShardLayout& layout, double tolerance) const {
  const int64_t tiles = (layout.local_tokens() + kGroupTile - 1) / kGroupTile;
  for (int64_t row = 0; row < heads_ * tiles; ++row) {
    std::string wrong;
    const std::vector<int64_t> kept =
        GroupsOfRow(groups, bounds, capacity, layout, heads_ * tiles, row, &wrong);
    if (wrong.empty()) {
      wrong = Complaint(static_cast<int>(row / tiles),
                        layout.Position(row % tiles * kGroupTile) / kGroupTile, kept, tolerance);
    }
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::vector<int64_t> GroupsOfRow(const std::vector<int32_t>& groups,
                                 const std::vector<int32_t>& bounds, int32_t capacity,
                                 const ShardLayout& layout, int64_t rows, int64_t row,
                                 std::string* wrong) {
  std::vector<int64_t> kept;
  ShardLayout owner = layout;
  for (owner.rank = 0; owner.rank < owner.ranks; ++owner.rank) {
    const int32_t begin = bounds.at(owner.rank * rows + row),
                  end = bounds.at((owner.rank + 1) * rows + row);
    if (begin < 0 || end < begin || end > capacity || (owner.rank == 0 && begin != 0)) {
      *wrong = absl::StrFormat("row %d: owner %d has [%d, %d)", row, owner.rank, begin, end);
      return {};
    }
    for (int32_t i = begin; i < end; ++i) {
      const int64_t group = groups.at(row * capacity + i), key = group * kGroupKeys;
      const bool ascends = i == begin || group > groups.at(row * capacity + i - 1);
      if (group < 0 || key >= layout.local_tokens() || !ascends) {
        *wrong =
            absl::StrFormat("row %d, owner %d: group %d is out of order", row, owner.rank, group);
        return {};
      }
      kept.push_back(owner.Position(key) / kGroupKeys);
    }
  }
  std::ranges::sort(kept);
  return kept;
}

}  // namespace ringleader::kernels::reference::testing
