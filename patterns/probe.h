// The probe of a pattern's recall: it compares the exact softmax over all keys, of a few queries,
// with what attention visited for them. Where a few queries choose for all (vertical-slash), those
// are others; under patterns that choose by query or by tile every query has a part in the choice.
#pragma once

#include <cstdint>

#include "patterns/attention_options.h"
#include "patterns/index/sequence_documents.h"

namespace ringleader::patterns {

inline constexpr int64_t kProbeQueries = 64;

// Whether training step `step` probes: the first, 1, and every probe_every-th; 0 stands for no step
// of training.
bool ProbesAt(const AttentionOptions& options, uint64_t step);

// Chooses the queries that `step` probes, kProbeQueries or as many as there are tokens, the same on
// all ranks. Each of as many equal parts of the sequence gives one, at a place that differs from
// step to step or, if the query there takes part in the choice (ChooseEstimateQueries), the nearest
// before it that does not. Padding gives none, nor do documents shorter than attention.dense_below
// where there are longer ones: theirs is dense attention. `documents` may be null.
EstimateQueries ChooseProbeQueries(const AttentionOptions& options, int64_t tokens, uint64_t step,
                                   const SequenceDocuments* documents);

}  // namespace ringleader::patterns
