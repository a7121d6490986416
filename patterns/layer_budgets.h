// Which budget applies to a layer: the options', until a plan replaces it.
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

  // By layer; layers past the end keep the options'. INVALID_ARGUMENT changes nothing.
  absl::Status Set(std::span<const LayerBudget> budgets);
  LayerBudget Of(int layer) const;

 private:
  const AttentionOptions& options_;
  std::vector<LayerBudget> budgets_;
};

}  // namespace ringleader::patterns
