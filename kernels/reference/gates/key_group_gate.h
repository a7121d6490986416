// The choice of groups of keys by the best pair of each (KeyGroupGateStep says what it is), and its
// lists.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/reference/math/engine.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::reference {

// Takes the step.
void ChooseKeyGroups(Engine& engine, int heads, int kv_heads, const KeyGroupGateStep& step);

// The lists' memory, with rows as long as the longest needs.
struct ListedGroups {
  std::vector<int32_t> groups, bounds;
  GroupLists lists;
};
// `layout`: of the queries.
ListedGroups ListGroups(const ChosenGroups& of, const ShardLayout& layout, int heads);

}  // namespace ringleader::kernels::reference
