// Cells of a sequence over ranks on GPUs: as RingCells, with the engine of GPUs. Ranks are threads
// of this process, each with a GPU of its own and NCCL between them where there are as many, or
// else all on the first one, which says whether results are right and nothing of speed.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "bench/longca/cell.h"
#include "bench/longca/problem.h"
#include "bench/longca/scheme.h"
#include "kernels/masks/masks.h"

namespace ringleader::bench {

inline constexpr int kGpuHeads = 64, kGpuKvHeads = 8, kGpuHeadDim = 128;

// Not thread-safe.
class GpuRingCells {
 public:
  explicit GpuRingCells(int gpus) : gpus_(gpus) {}

  // Forward and backward at `tokens`, a multiple of 2 × ranks × 128, of kGpuHeads over kGpuKvHeads,
  // after a check in fp64 in small.
  std::vector<Cell> Measure(kernels::MaskKind mask, const Scheme& scheme, int64_t tokens,
                            int repetitions);

 private:
  struct Checked {
    Problem problem;  // of values that bf16 holds
    kernels::reference::testing::MaskedAttention expected;
  };
  const Checked& CheckedOf(kernels::MaskKind mask, int ranks);
  absl::Status Fill(kernels::MaskKind mask, const Scheme& scheme, int repetitions,
                    std::vector<Cell>* cells);

  const int gpus_;
  std::map<std::pair<kernels::MaskKind, int>, Checked> checked_;
};

}  // namespace ringleader::bench
