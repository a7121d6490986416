// Budgets of heads that follow the probe (attention.head_budgets: by_probe): those in which it
// found little get half more in the next steps, and as many in which it found much half of it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ringleader::patterns {

// What the probes of a layer say so far; empty before the first.
struct LayerBudgets {
  // [heads]: the recall that was probed, in units of 2^-kMassBits: a mean in which each probe
  // weighs a quarter, and all before it the rest.
  std::vector<int64_t> recall;
  std::vector<int32_t> halves;  // [heads], of the budget: 1, 2 or 3; their sum is 2 * heads

  bool operator==(const LayerBudgets&) const = default;
};

// Whether it is as FollowProbe leaves it.
bool IsSound(const LayerBudgets& budgets);
// Whether they are of a model of so many layers and heads: none, or of each layer, of all heads or
// of none.
bool AreOfModel(std::span<const LayerBudgets> layers, int64_t model_layers, int64_t heads);

// For layers of which `heads_together` neighbours have one budget: where they have not, as a
// checkpoint leaves them in which fewer did, all heads of the layer have the same until the next
// probe.
void ShareBudgets(int heads_together, std::span<LayerBudgets> layers);

// Takes in a probe of layer `layer`: of `queries` queries in all, which visited `visited` of each
// head's attention, in units of 2^-kMassBits. Whole numbers alone, so that all ranks agree.
// `heads_together` neighbours have one budget and count as a head of their mean recall. The head of
// the most recall is matched with that of the least, the next with the next, and so on. The first
// of two gives half of its budget to the other if it recalls more, and more than
// kernels::kGoodRecall or, if it has given already, with that half alone: so budgets do not swing
// to and fro because a head that gave recalls less. Of heads that recall alike those of lower
// number are first in even layers and last in odd ones.
void FollowProbe(int layer, std::span<const int64_t> visited, int64_t queries, int heads_together,
                 LayerBudgets* budgets);

}  // namespace ringleader::patterns
