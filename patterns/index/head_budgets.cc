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

void FollowProbe(int layer, std::span<const int64_t> visited, int64_t queries,
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
  std::vector<size_t> order(heads);
  std::iota(order.begin(), order.end(), size_t{0});
  if (layer % 2 != 0) std::reverse(order.begin(), order.end());
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return budgets->recall[a] > budgets->recall[b]; });
  const std::vector<int32_t> earlier = budgets->halves;
  std::fill(budgets->halves.begin(), budgets->halves.end(), 2);
  for (size_t i = 0; i < heads / 2; ++i) {
    const size_t most = order[i], least = order[heads - 1 - i];
    const int64_t recall = budgets->recall[most];
    const bool is_good =
        std::ldexp(static_cast<double>(recall), -kernels::kMassBits) > kernels::kGoodRecall;
    if (recall == budgets->recall[least] || !(is_good || earlier[most] == 1)) continue;
    budgets->halves[most] = 1;
    budgets->halves[least] = 3;
  }
}

}  // namespace ringleader::patterns
