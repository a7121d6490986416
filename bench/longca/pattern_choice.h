// The patterns by which the ranks of a scheme choose among the keys that a mask shows them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/longca/asked_mask.h"
#include "patterns/attention_options.h"

namespace ringleader::bench {

struct PatternChoice {
  patterns::Pattern pattern = patterns::Pattern::kDense;  // everything that the mask shows
  double density = 1;                                     // share of the causal tiles

  bool is_all() const { return pattern == patterns::Pattern::kDense; }
  std::string name() const;  // "all", "block_topk 5 %"
  // Not under windows, which are a pattern themselves, and masks that no job can name; and, where
  // the choice is of earlier keys by construction, under causal masks alone.
  bool GoesWith(const Asked& asked) const;
  // Makes options of dense attention those of this choice, of sequences of `tokens`.
  void Apply(int64_t tokens, patterns::AttentionOptions* options) const;
};

// The patterns whose choice can be brought to a density, as jobs call them.
std::vector<std::string> ChoosingPatterns();
// One of these.
patterns::Pattern PatternCalled(const std::string& name);

}  // namespace ringleader::bench
