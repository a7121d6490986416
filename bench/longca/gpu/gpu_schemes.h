// Masks x schemes x directions x lengths on the GPUs of this machine.
#pragma once

#include "absl/status/statusor.h"
#include "bench/longca/bench_options.h"

namespace ringleader::bench {

// Writes longca_gpu_rings, .csv and .svg, into options.folder as cells are measured, each checked
// against fp64 in small (gpu_ring_cells.h); returns how many are wrong. An error without a Hopper,
// LibTorch's CUDA libraries, or kernels for GPUs in this build, and where it cannot write.
absl::StatusOr<int> RunGpuSchemes(const BenchOptions& options);

// The GPUs that it runs on; 0 in a build without kernels for them.
int GpuCount();

}  // namespace ringleader::bench
