// The balance section of attention_bench_cpu.
#pragma once

namespace ringleader::bench {

// Prints max/mean of the tiles per rank and per ring step, exact, for synthetic vertical-slash
// selections under each layout.
void BenchBalance();

}  // namespace ringleader::bench
