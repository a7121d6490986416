// Block-sparse attention on the CPU, forward and backward: flash attention over lists of tiles.
//
// Contract of the arguments: ringleader/kernels/attention.h; any head_dim up to 256, tiles up to
// 128 tokens. fp32 throughout. Results depend neither on the number of threads nor on the run: a
// query's sums are made in the order of its tiles. INVALID_ARGUMENT names the argument that does
// not fit.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/reference/math/engine.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::reference {

// `visited_tiles`, where not null, receives the number of tiles over all heads, TilesOfGroups of
// groups.
absl::Status AttentionForward(Engine& engine, const AttentionForwardArgs<float>& args,
                              int64_t* visited_tiles = nullptr);

absl::Status AttentionBackward(Engine& engine, const AttentionBackwardArgs<float>& args);

// delta[h, i] = d_out[i, h] . out[i, h], what backward needs once a layer. delta: [heads, n]
void AttentionDelta(Engine& engine, const TokenMajor<const float>& d_out,
                    const TokenMajor<const float>& out, float* delta);

}  // namespace ringleader::kernels::reference
