// Rows of latency tables for tests.
#pragma once

#include "balance/latency_table.h"

namespace ringleader::balance {

// A row of the 3B shape: a third of `ms` is forward, the ninth decile is a tenth above it.
inline Row RowOf(int64_t tokens, double density, double ms) {
  return {.pattern = "vertical_slash",
          .tile = 128,
          .heads = 16,
          .kv_heads = 2,
          .head_dim = 128,
          .tokens = tokens,
          .density = density,
          .p50_ms = ms,
          .p90_ms = 1.1 * ms,
          .forward_p50_ms = ms / 3};
}

}  // namespace ringleader::balance
