// XAttention's choice of blocks (arXiv 2503.16428): AntidiagonalGateStep says what it is.
#pragma once

#include "kernels/reference/math/engine.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::reference {

// Takes the step. q: [n, heads, d], this rank's; k: [tokens, kv_heads, d], the whole sequence's.
void ChooseByAntidiagonals(Engine& engine, const TokenMajor<const float>& q,
                           const TokenMajor<const float>& k, const AntidiagonalGateStep& step);

}  // namespace ringleader::kernels::reference
