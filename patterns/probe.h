// The probe of a pattern's recall: it compares the exact softmax over all keys, of a few queries,
// with what attention visited for them. They have no part in the choice: where a few queries choose
// for all (vertical-slash), or the first of a tile for its tile, those are others, and where all
// queries of a tile do, the probed ones are silent in this step. Only where each query chooses for
// itself alone (moba) it is the one that chose.
#pragma once

#include <cstdint>
#include <optional>

#include "patterns/attention_options.h"
#include "patterns/index/sequence_documents.h"

namespace ringleader::patterns {

inline constexpr int64_t kProbeQueries = 64;

// Whether training step `step` probes: the first, 1, and every probe_every-th; 0 stands for no step
// of training.
bool ProbesAt(const AttentionOptions& options, uint64_t step);

// Chooses the queries that `step` probes, kProbeQueries or as many as there are tokens, the same on
// all ranks; one in four of the tokens at most where others choose without them (SilenceOf). Each
// of as many equal parts of the sequence gives one, at a place that differs from step to step or,
// if the query there chooses for others or is probed already, the nearest before it. Padding gives
// none, nor do documents shorter than attention.dense_below where there are longer ones: theirs is
// dense attention. `documents` may be null.
EstimateQueries ChooseProbeQueries(const AttentionOptions& options, int64_t tokens, uint64_t step,
                                   const SequenceDocuments* documents);

// Chooses about as many queries that do have a say in what `step` chooses: of each that it probes,
// the nearest before it that it does not. None where those probed are not silent (SilenceOf), or an
// index counts what the queries that choose recall by it (PatternDefinition).
EstimateQueries ChooseHeardQueries(const AttentionOptions& options, int64_t tokens, uint64_t step,
                                   const SequenceDocuments* documents);

// What stands in the place of the probed queries while the others choose (PatternDefinition); null
// where these choose nothing for others.
std::optional<float> SilenceOf(const AttentionOptions& options);

}  // namespace ringleader::patterns
