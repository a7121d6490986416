// The masks of the bench as attention is asked for them.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "bench/longca/problem.h"
#include "kernels/masks/masks.h"
#include "patterns/index/mask.h"
#include "worker/attention/runner/context_attention.h"

namespace ringleader::bench {

struct Asked {
  patterns::Mask mask = patterns::Mask::kCausal;
  int64_t window = 0, block = 0;
  std::vector<int64_t> firsts = {0}, prefix_ends = {};  // of documents
  // What each query sees, under a mask that no job can name; else empty.
  std::vector<kernels::KeyIntervals> visible = {};
};

Asked AskFor(const MaskedSequence& sequence, kernels::MaskKind kind);

// Tells `attention` of the documents of `asked`, or of what its queries see.
absl::Status SetMask(const Asked& asked, int64_t tokens, attention::ContextAttention* attention);

}  // namespace ringleader::bench
