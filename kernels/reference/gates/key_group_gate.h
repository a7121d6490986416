// The choice of groups of keys by the best pair of each: KeyGroupGateStep says what it is.
#pragma once

#include "kernels/reference/math/engine.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::reference {

// Takes the step.
void ChooseKeyGroups(Engine& engine, int heads, int kv_heads, const KeyGroupGateStep& step);

}  // namespace ringleader::kernels::reference
