// The ways to run a job among which the planner chooses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/planner/cost/shapes.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::planner {

struct Candidate {
  v1::ParallelismSpec::Layout layout;
  uint32_t stripe;
  v1::ParallelismSpec::Ring ring;
  uint32_t window;  // ranks of an inner ring; of a ring that has none all of them
};

// The ranks of a job's rings on its nodes.
GroupShape RingGroupOf(const v1::JobSpec& spec, const ClusterShape& cluster);

// Tokens of a stripe: what the job file says; else, on GPUs and where all sequences are of one
// length, what suits the pattern (PatternDefinition::stripe_on_gpus); else a tile.
uint32_t StripeOf(const v1::JobSpec& spec);

// In order of preference: stripes (StripeOf) balance any set of diagonals. `by_documents`: the
// lengths of documents are known, so that they may be laid out by themselves though the job file
// does not ask for it. INVALID_ARGUMENT if the sequences divide in no layout that the job allows.
absl::StatusOr<std::vector<Candidate>> Candidates(const v1::JobSpec& spec, const GroupShape& group,
                                                  bool by_documents);

void Apply(const Candidate& candidate, const v1::JobSpec& spec, v1::StepPlan* plan);

// Whether keys travel another way.
bool HasNewRing(const v1::StepPlan& before, const v1::StepPlan& after);

// "striped(64), flat"; "zigzag, hierarchical(8)" with its window; "zigzag, all_gather(2 groups of
// heads)" where the planner picked them.
std::string NameOf(const v1::StepPlan& plan);

}  // namespace ringleader::planner
