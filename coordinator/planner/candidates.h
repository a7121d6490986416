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
};

// The ranks of a job's rings on its nodes.
GroupShape RingGroupOf(const v1::JobSpec& spec, const ClusterShape& cluster);

// Ranks of an inner ring, of a hierarchical one: those of a node, unless the job says otherwise.
uint32_t WindowOf(const v1::ParallelismSpec& asked, const GroupShape& group);

// In order of preference: stripes of one tile balance any set of diagonals. `by_documents`: the
// lengths of documents are known, so that they may be laid out by themselves though the job file
// does not ask for it. INVALID_ARGUMENT if the sequences divide in no layout that the job allows.
absl::StatusOr<std::vector<Candidate>> Candidates(const v1::JobSpec& spec, const GroupShape& group,
                                                  bool by_documents);

void Apply(const Candidate& candidate, const v1::JobSpec& spec, const GroupShape& group,
           v1::StepPlan* plan);

// "striped(64), flat"
std::string NameOf(const v1::StepPlan& plan);

}  // namespace ringleader::planner
