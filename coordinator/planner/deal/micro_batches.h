// Deals the sequences of a step to data-parallel groups by predicted seconds.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::planner {

struct Assignment {
  std::vector<std::vector<uint32_t>> groups;  // sequence numbers, ascending
  double slowest_seconds = 0;
};

// How many sequences a group may get.
enum class GroupSizes {
  kAny,   // at least one, if there are enough
  kSame,  // as many as any other; sequences must divide by groups
};

// `seconds[i]`: what sequence i is predicted to take. Longest first to the group that ends first,
// then moves and swaps while they shorten the slowest group, up to a bound on what is compared.
// Deterministic. `groups` >= 1.
Assignment AssignMicroBatches(const std::vector<double>& seconds, int groups, GroupSizes sizes);

// [group]: the lengths of the sequences that a data-parallel group trains in a step under `plan`.
// INVALID_ARGUMENT names a sequence beyond the global batch, or a group beyond parallelism.data.
absl::StatusOr<std::vector<std::vector<uint64_t>>> LengthsOfGroups(const v1::JobSpec& spec,
                                                                   const v1::StepPlan& plan);

}  // namespace ringleader::planner
