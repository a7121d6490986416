#include "kernels/reference/index/index_select.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace ringleader::kernels::reference {

namespace {

// Orders candidates: forced ones first, then by falling mass.
bool Precedes(const ColumnCandidate& x, const ColumnCandidate& y, int64_t sink_tokens, bool late) {
  const bool x_forced = x.position < sink_tokens, y_forced = y.position < sink_tokens;
  if (x_forced != y_forced) return x_forced;
  if (x.mass != y.mass) return x.mass > y.mass;
  return late && !x_forced ? x.position > y.position : x.position < y.position;
}

// Sorts the first `count` of all into place.
template <typename Compare>
void SortFront(std::vector<ColumnCandidate>& all, size_t count, Compare compare) {
  count = std::min(count, all.size());
  std::nth_element(all.begin(), all.begin() + count, all.end(), compare);
  std::sort(all.begin(), all.begin() + count, compare);
}

}  // namespace

void CandidateColumns(const int32_t* column_mass, const ShardLayout& layout, int64_t sink_tokens,
                      int32_t count, ColumnCandidate* out, bool late) {
  std::vector<ColumnCandidate> all;
  for (int64_t i = 0; i < layout.local_tokens(); ++i) {
    const int64_t position = layout.Position(i);
    if (column_mass[i] > 0 || position < sink_tokens) all.push_back({position, column_mass[i]});
  }
  const auto compare = [&](const ColumnCandidate& x, const ColumnCandidate& y) {
    return Precedes(x, y, sink_tokens, late);
  };
  SortFront(all, count, compare);
  all.resize(count);
  std::copy(all.begin(), all.end(), out);
}

int32_t SelectColumns(const ColumnCandidate* candidates, int64_t candidate_count, int64_t total,
                      int64_t sink_tokens, float mass, int32_t max_count, int32_t capacity,
                      int64_t* positions, Taken* taken, bool late) {
  constexpr int64_t kUnused = std::numeric_limits<int64_t>::max();
  std::vector<ColumnCandidate> all;
  std::copy_if(candidates, candidates + candidate_count, std::back_inserter(all),
               [](const ColumnCandidate& c) { return c.position != kUnused; });
  const auto compare = [&](const ColumnCandidate& x, const ColumnCandidate& y) {
    return Precedes(x, y, sink_tokens, late);
  };
  SortFront(all, capacity, compare);
  const int64_t target = MassTarget(total, mass);
  int64_t covered = 0;
  int32_t count = 0;
  for (const ColumnCandidate& column : all) {
    if (count == capacity) break;
    const bool forced = column.position < sink_tokens;
    if (!forced && (covered >= target || count >= max_count || column.mass == 0)) break;
    covered += column.mass;
    positions[count++] = column.position;
  }
  std::sort(positions, positions + count);
  std::fill(positions + count, positions + capacity, kUnused);
  if (taken != nullptr) *taken = {covered, count >= max_count && covered < target};
  return count;
}

int32_t SelectDiagonals(const int32_t* diagonal_mass, int64_t blocks, int32_t local_blocks,
                        float mass, int32_t max_count, uint64_t* words, bool by_tiles, Taken* taken,
                        int64_t content_blocks) {
  if (content_blocks == 0) content_blocks = blocks;
  std::fill_n(words, (blocks + 63) / 64, 0);
  std::vector<int64_t> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  const int64_t total = std::accumulate(diagonal_mass, diagonal_mass + blocks, int64_t{0});
  const int64_t forced = std::min<int64_t>(blocks, int64_t{local_blocks} + 1);
  std::sort(order.begin() + forced, order.end(), [&](int64_t x, int64_t y) {
    return diagonal_mass[x] != diagonal_mass[y] ? diagonal_mass[x] > diagonal_mass[y] : x < y;
  });
  const int64_t target = MassTarget(total, mass);
  int64_t covered = 0, cost = 0;
  int32_t count = 0;
  for (const int64_t delta : order) {
    if (count >= forced && (covered >= target || cost >= max_count || diagonal_mass[delta] == 0)) {
      break;
    }
    covered += diagonal_mass[delta];
    cost += DiagonalCost(by_tiles, content_blocks, delta);
    words[delta / 64] |= uint64_t{1} << (delta % 64);
    ++count;
  }
  if (taken != nullptr) *taken = {covered, cost >= max_count && covered < target};
  return count;
}

void AdaptBudgets(std::span<const double> recall, int32_t* max_counts) {
  const auto heads = static_cast<int>(recall.size());
  const auto good = static_cast<int>(
      std::ranges::count_if(recall, [](double head) { return head > kGoodRecall; }));
  for (int head = 0; head < heads; ++head) {
    int better = 0;
    for (int other = 0; other < heads; ++other) {
      better += recall[other] > recall[head] || (recall[other] == recall[head] && other < head);
    }
    for (int32_t* const count : {&max_counts[head], &max_counts[heads + head]}) {
      *count = AdaptedCount(*count, better, good, heads);
    }
  }
}

}  // namespace ringleader::kernels::reference
