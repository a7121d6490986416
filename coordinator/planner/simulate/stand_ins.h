// What stands for all of a job when its plans are priced: some layers and heads, and some lengths
// of samples or documents, between which plans say what others weigh.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "balance/sample_weights.h"
#include "patterns/attention_options.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::planner {

// How many layers, and heads of each, are sampled to stand for all of a pattern's, on `ranks`
// ranks, in a sequence of `blocks` tiles.
int SampledLayers(const patterns::AttentionOptions& attention, int64_t layers, int ranks);
int SampledHeads(const patterns::AttentionOptions& attention, int ranks, int64_t blocks);

// What a plan's samples or documents weigh when its trainers deal them. INVALID_ARGUMENT where that
// makes no sense.
absl::StatusOr<balance::SampleWeights> WeightsOf(const v1::StepPlan& plan);

// The lengths of samples or documents for which plans say what they take, ascending: two an octave,
// in whole tiles for every rank; of many ranks four or two in all, an octave apart. Empty unless
// documents are samples, or are laid out by themselves in `layout`.
std::vector<uint64_t> WeighedLengths(const v1::JobSpec& spec, v1::ParallelismSpec::Layout layout);

}  // namespace ringleader::planner
