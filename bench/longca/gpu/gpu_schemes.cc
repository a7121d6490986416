#include "bench/longca/gpu/gpu_schemes.h"

#include <cstdio>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "bench/longca/cell.h"
#include "bench/longca/gpu/gpu_ring_cells.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/sm90/hopper.h"

namespace ringleader::bench {

int GpuCount() {
  int gpus = 0;
  return cudaGetDeviceCount(&gpus) == cudaSuccess ? gpus : 0;
}

absl::StatusOr<int> RunGpuSchemes(const BenchOptions& options) {
  RETURN_IF_ERROR(kernels::ops::LoadTorchCuda());
  RETURN_IF_ERROR(kernels::sm90::CheckHopper());
  const int gpus = GpuCount();
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) {
    return absl::FailedPreconditionError("the first GPU does not say what it is");
  }
  const TableFacts facts = {
      .heads = kGpuHeads,
      .head_dim = kGpuHeadDim,
      .backend = absl::StrCat("sm90, NCCL; more ranks than ", gpus, " share GPUs"),
      .lengths = options.lengths.name(),
      .hardware = absl::StrCat(gpus, " x ", properties.name),
      .commit = options.commit};
  GpuRingCells bench(gpus, options.lengths);
  std::vector<Cell> cells;
  const auto write = [&] { return WriteTable(options.folder, "longca_gpu_rings", cells, facts); };
  RETURN_IF_ERROR(write());  // what cannot be is said at once
  int wrong = 0;
  for (const int64_t tokens : options.tokens) {
    for (const kernels::MaskKind mask : options.masks) {
      for (const int ranks : options.ranks) {
        const int64_t whole = options.SharedTokens(tokens, ranks, /*tile=*/128);
        for (const PatternChoice& choice : options.choices()) {
          for (const Scheme& scheme : SchemesOn(ranks)) {
            wrong += AddCells(bench.Measure({mask, choice, scheme}, whole, options.repetitions),
                              kGpuHeads, kGpuHeadDim, &cells);
          }
        }
      }
      // As it grows: a run over all masks of long sequences takes many minutes.
      RETURN_IF_ERROR(write());
    }
  }
  std::printf("%zu cells, %d of them wrong, on %d GPUs; in %s: longca_gpu_rings, .csv and .svg\n",
              cells.size(), wrong, gpus, options.folder.c_str());
  return wrong;
}

}  // namespace ringleader::bench
