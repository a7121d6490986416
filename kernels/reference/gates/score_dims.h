// The dimensions by which groups of keys are scored, and queries and keys narrowed to them, by the
// steps of their names in ringleader/kernels/block_choice.h.
#pragma once

#include <cstdint>

#include "kernels/reference/math/engine.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::reference {

// Take the steps. q: [n, heads, d] and k: [n, kv_heads, d], this rank's.
void SumDimEnergy(Engine& engine, const TokenMajor<const float>& q,
                  const TokenMajor<const float>& k, const DimEnergyStep& step);
void PickDims(int kv_heads, int head_dim, const PickDimsStep& step);
void NarrowRows(Engine& engine, const TokenMajor<const float>& q, const TokenMajor<const float>& k,
                const NarrowRowsStep& step);

}  // namespace ringleader::kernels::reference
