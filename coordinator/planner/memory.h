// Whether a job fits into its trainers' memory, from below: what is counted is needed for certain.
#pragma once

#include "absl/status/status.h"
#include "coordinator/planner/shapes.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::planner {

struct MemoryEstimate {  // bytes of one trainer
  double weights = 0;
  double gradients = 0;
  double optimizer = 0;    // fp32 master weights and two moments, sharded over all trainers
  double activations = 0;  // what each layer keeps for backward
  double keys_and_values = 0;

  double total() const { return weights + gradients + optimizer + activations + keys_and_values; }
};

MemoryEstimate EstimateMemory(const v1::JobSpec& spec, const ModelShape& model,
                              const ClusterShape& cluster, v1::ParallelismSpec::Ring ring);

// INVALID_ARGUMENT with the arithmetic if the estimate is more than a trainer has.
absl::Status CheckMemory(const MemoryEstimate& estimate, const v1::JobSpec& spec,
                         const ModelShape& model, const ClusterShape& cluster);

}  // namespace ringleader::planner
