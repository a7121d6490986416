// AdaSpa's exact block masses and what is chosen by them (arXiv 2502.21079): the steps of
// ringleader/kernels/block_mass.h say what each is.
#pragma once

#include "kernels/reference/math/engine.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::reference {

// q: [n, heads, d], this rank's; k: [tokens, kv_heads, d], the whole sequence's.
void BlockMass(Engine& engine, const TokenMajor<const float>& q, const TokenMajor<const float>& k,
               const BlockMassStep& step);

void SelectBlocksByMass(Engine& engine, const MassGateStep& step);

void AdaptDensity(const AdaptDensityStep& step);

}  // namespace ringleader::kernels::reference
