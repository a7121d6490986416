// Selected columns (verticals) on the CPU: picked up from their owners into dense rows, attended to
// outside the ring, their gradients given back.
//
// Columns that lie ahead of a query, in another document, or in a tile that the query's block
// diagonal covers already, are skipped (ColumnSelection in ringleader/kernels/attention.h).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/reference/math/engine.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::reference {

// Copies the columns that `owner` has from its k, v: [n, kv_heads, d] to the rows of `columns` of
// each query head: keys, values: [heads, max_columns, d].
void GatherColumns(const TokenMajor<const float>& k, const TokenMajor<const float>& v,
                   const ShardLayout& owner, const ColumnSelection& columns, int heads, float* keys,
                   float* values);

// Adds the gradients of the columns that `owner` has to its dk, dv, in the order of heads.
void ScatterColumns(const float* d_keys, const float* d_values, const ShardLayout& owner,
                    const ColumnSelection& columns, int heads, const TokenMajor<float>& dk,
                    const TokenMajor<float>& dv);

using ColumnForwardArgs = kernels::ColumnForwardArgs<float>;
using ColumnBackwardArgs = kernels::ColumnBackwardArgs<float>;

// `visited_tiles`, where not null: tiles of `tile` queries by `tile` columns, over all heads.
absl::Status ColumnForward(Engine& engine, const ColumnForwardArgs& args,
                           int64_t* visited_tiles = nullptr);

// The same bits every time, whatever `deterministic` says.
absl::Status ColumnBackward(Engine& engine, const ColumnBackwardArgs& args);

}  // namespace ringleader::kernels::reference
