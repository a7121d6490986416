// Cells of a sequence over ranks on GPUs: as RingCells, with the engine of GPUs. Ranks are threads
// of this process, each with a GPU of its own and NCCL between them where there are as many, or
// else all on the first one, which says whether results are right and nothing of speed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bench/longca/cell.h"
#include "bench/longca/lengths/document_lengths.h"
#include "bench/longca/ranks/rank_run.h"
#include "kernels/masks/masks.h"
#include "patterns/attention_options.h"

namespace ringleader::bench {

inline constexpr int kGpuHeads = 64, kGpuKvHeads = 8, kGpuHeadDim = 128;

// Not thread-safe.
class GpuRingCells {
 public:
  explicit GpuRingCells(int gpus, DocumentLengths lengths = {})
      : gpus_(gpus), lengths_(std::move(lengths)) {}

  // Forward and backward at `tokens`, a multiple of 2 × ranks × 128, of kGpuHeads over kGpuKvHeads,
  // after a check in fp64 in small. Of choices as CpuRingCells::Measure.
  std::vector<Cell> Measure(const Setting& setting, int64_t tokens, int repetitions);

 private:
  struct Checked;
  // What one rank attends to with the setting's mask and choice. Throws c10::Error.
  const Checked& CheckedOf(const Setting& setting, int64_t tokens);
  absl::Status Fill(const Setting& setting, int repetitions, std::vector<Cell>* cells);

  using Of = std::tuple<kernels::MaskKind, patterns::Pattern, double, int64_t>;
  const int gpus_;
  const DocumentLengths lengths_;
  std::map<Of, std::shared_ptr<const Checked>> checked_;
};

}  // namespace ringleader::bench
