#include "patterns/layer_budgets.h"

#include <algorithm>

#include "base/status_macros.h"
#include "patterns/pattern.h"

namespace ringleader::patterns {

AttentionOptions LayerBudgets::Under(const LayerBudget& budget) const {
  AttentionOptions options = options_;
  options.budget = budget.vertical_slash;
  if (budget.dense) options.pattern = Pattern::kDense;
  return options;
}

absl::Status LayerBudgets::Set(std::span<const LayerBudget> budgets) {
  for (const LayerBudget& budget : budgets) {
    RETURN_IF_ERROR(DefinitionOf(options_.pattern).check(Under(budget)));
  }
  budgets_.assign(budgets.begin(), budgets.end());
  return absl::OkStatus();
}

AttentionOptions LayerBudgets::Of(int layer) const {
  if (layer < static_cast<int>(budgets_.size())) return Under(budgets_[layer]);
  const std::vector<int>& dense = options_.dense_layers;
  return Under(
      {.dense = std::ranges::find(dense, layer) != dense.end(), .vertical_slash = options_.budget});
}

}  // namespace ringleader::patterns
