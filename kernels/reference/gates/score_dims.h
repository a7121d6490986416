// What groups of keys are scored by (DimEnergyStep, PickDimsStep and NarrowRowsStep say what it
// is), and its codes.
#pragma once

#include <cstdint>

#include "kernels/reference/math/engine.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::reference {

// The e4m3 value that is nearest to x, ties to even; 448, the largest, for what is larger.
uint8_t ToE4m3(float x);
float FromE4m3(uint8_t code);

// Take the steps. q: [n, heads, d] and k: [n, kv_heads, d], this rank's.
void SumDimEnergy(Engine& engine, const TokenMajor<const float>& q,
                  const TokenMajor<const float>& k, const DimEnergyStep& step);
void PickDims(int kv_heads, int head_dim, const PickDimsStep& step);
void NarrowRows(Engine& engine, const TokenMajor<const float>& q, const TokenMajor<const float>& k,
                const NarrowRowsStep& step);

}  // namespace ringleader::kernels::reference
