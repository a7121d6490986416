// The masks of the bench as a job asks for them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "bench/longca/problem.h"
#include "kernels/masks/masks.h"
#include "patterns/index/mask.h"

namespace ringleader::bench {

struct Asked {
  patterns::Mask mask = patterns::Mask::kCausal;
  int64_t window = 0, block = 0;
  std::vector<int64_t> firsts = {0}, prefix_ends = {};  // of documents
};

// nullopt: no job can ask for it.
std::optional<Asked> AskFor(const MaskedSequence& sequence, kernels::MaskKind kind);

}  // namespace ringleader::bench
