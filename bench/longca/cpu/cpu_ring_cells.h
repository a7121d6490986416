// Cells of a sequence over ranks: each mask and each pattern's choice of its keys under each
// scheme, on CPU ranks that are threads of this process and run what the trainers of a job run.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/longca/cell.h"
#include "bench/longca/lengths/document_lengths.h"
#include "bench/longca/ranks/rank_run.h"
#include "kernels/masks/masks.h"
#include "patterns/attention_options.h"

namespace ringleader::bench {

// Not thread-safe.
class CpuRingCells {
 public:
  explicit CpuRingCells(DocumentLengths lengths = {}) : lengths_(std::move(lengths)) {}

  // Forward and backward at `tokens`, a multiple of 2 × ranks × kTile, after a check in fp64 in
  // small. "unsupported" where the choice goes not with the mask or the heads of a rank, and with
  // helpers for choices and for masks that show keys of a later rank. Of a choice `share` goes by
  // its tiles, and a cell is wrong, too, if its ranks attend to what the mask hides or to other
  // keys than one rank would.
  std::vector<Cell> Measure(const Setting& setting, int64_t tokens, int repetitions);

 private:
  struct Checked;
  bool IsSupported(const Setting& setting, int64_t tokens) const;
  // What one rank attends to with the setting's mask and choice, at a length that fp64 checks.
  absl::StatusOr<std::shared_ptr<const Checked>> CheckedOf(const Setting& setting, int64_t tokens);
  absl::Status Fill(const Setting& setting, int repetitions, std::vector<Cell>* cells);

  using Of = std::tuple<kernels::MaskKind, patterns::Pattern, double, int64_t>;
  const DocumentLengths lengths_;
  std::map<Of, std::shared_ptr<const Checked>> checked_;
};

}  // namespace ringleader::bench
