#include "patterns/layer_budgets.h"

#include <algorithm>

#include "base/status_macros.h"
#include "patterns/check_options.h"

namespace ringleader::patterns {

absl::Status LayerBudgets::Set(std::span<const LayerBudget> budgets) {
  for (const LayerBudget& budget : budgets) RETURN_IF_ERROR(CheckBudget(budget));
  budgets_.assign(budgets.begin(), budgets.end());
  return absl::OkStatus();
}

LayerBudget LayerBudgets::Of(int layer) const {
  if (layer < static_cast<int>(budgets_.size())) return budgets_[layer];
  LayerBudget budget = options_.budget;
  budget.dense |= std::ranges::find(options_.dense_layers, layer) != options_.dense_layers.end();
  return budget;
}

}  // namespace ringleader::patterns
