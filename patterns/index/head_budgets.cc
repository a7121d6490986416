#include "patterns/index/head_budgets.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "ringleader/kernels/index.h"

namespace ringleader::patterns {
namespace {

constexpr int64_t kProbesOfMean = 4;

}  // namespace

bool IsSound(const LayerBudgets& budgets) {
  const auto heads = std::ssize(budgets.recall);
  return std::ssize(budgets.halves) == heads &&
         std::all_of(budgets.halves.begin(), budgets.halves.end(),
                     [](int32_t halves) { return halves >= 1 && halves <= 3; }) &&
         std::accumulate(budgets.halves.begin(), budgets.halves.end(), int64_t{0}) == 2 * heads;
}

bool AreOfModel(std::span<const LayerBudgets> layers, int64_t model_layers, int64_t heads) {
  return layers.empty() || (std::ssize(layers) == model_layers &&
                            std::ranges::all_of(layers, [heads](const LayerBudgets& layer) {
                              return layer.halves.empty() || std::ssize(layer.halves) == heads;
                            }));
}

void ShareBudgets(int heads_together, std::span<LayerBudgets> layers) {
  for (LayerBudgets& layer : layers) {
    std::vector<int32_t>& halves = layer.halves;
    for (size_t head = 0; head < halves.size(); ++head) {
      if (halves[head] != halves[head / heads_together * heads_together]) {
        std::fill(halves.begin(), halves.end(), 2);
      }
    }
  }
}

void FollowProbe(int layer, std::span<const int64_t> visited, int64_t queries, int heads_together,
                 LayerBudgets* budgets) {
  const size_t heads = visited.size();
  const bool is_first = budgets->recall.empty();
  budgets->recall.resize(heads);
  budgets->halves.resize(heads, 2);
  for (size_t head = 0; head < heads; ++head) {
    int64_t& mean = budgets->recall[head];
    const int64_t probed = visited[head] / queries;
    mean = is_first ? probed : mean + (probed - mean) / kProbesOfMean;
  }
  const size_t rows = heads / heads_together;  // of heads with one budget
  std::vector<int64_t> recalls(rows);
  for (size_t head = 0; head < rows * heads_together; ++head) {
    recalls[head / heads_together] += budgets->recall[head];
  }
  for (int64_t& recall : recalls) recall /= heads_together;
  std::vector<size_t> order(rows);
  std::iota(order.begin(), order.end(), size_t{0});
  if (layer % 2 != 0) std::reverse(order.begin(), order.end());
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return recalls[a] > recalls[b]; });
  const std::vector<int32_t> earlier = budgets->halves;
  std::fill(budgets->halves.begin(), budgets->halves.end(), 2);
  const auto set = [&](size_t row, int32_t halves) {
    std::fill_n(budgets->halves.begin() + static_cast<int64_t>(row) * heads_together,
                heads_together, halves);
  };
  for (size_t i = 0; i < rows / 2; ++i) {
    const size_t most = order[i], least = order[rows - 1 - i];
    const bool is_good =
        std::ldexp(static_cast<double>(recalls[most]), -kernels::kMassBits) > kernels::kGoodRecall;
    const bool has_given = earlier[most * heads_together] == 1;
    if (recalls[most] == recalls[least] || !(is_good || has_given)) continue;
    set(most, 1);
    set(least, 3);
  }
}

}  // namespace ringleader::patterns
