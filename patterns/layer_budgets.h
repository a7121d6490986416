// Which options apply to a layer: the job's, until a plan replaces its budget.
#pragma once

#include <span>
#include <vector>

#include "absl/status/status.h"
#include "patterns/attention_options.h"

namespace ringleader::patterns {

class LayerBudgets {
 public:
  // `options` outlive it.
  explicit LayerBudgets(const AttentionOptions& options) : options_(options) {}

  // By layer; layers past the end keep the options'. INVALID_ARGUMENT, from the pattern's checks,
  // changes nothing.
  absl::Status Set(std::span<const LayerBudget> budgets);
  // The pattern of a layer that is to stay dense is kDense.
  AttentionOptions Of(int layer) const;

 private:
  AttentionOptions Under(const LayerBudget& budget) const;

  const AttentionOptions& options_;
  std::vector<LayerBudget> budgets_;
};

}  // namespace ringleader::patterns
