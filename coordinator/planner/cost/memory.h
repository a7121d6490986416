// Whether a job fits into its trainers' memory, from below: the trainers' own estimate
// (model_shape/memory_estimate.h) of the policy that takes least, without its working memory. What
// is counted is needed for certain, so that nothing is refused that could run.
#pragma once

#include "absl/status/status.h"
#include "coordinator/planner/cost/shapes.h"
#include "model_shape/model_config.h"
#include "patterns/pattern.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::planner {

struct MemoryEstimate {  // bytes of one trainer
  double weights = 0;    // whole, or the shard and what is gathered where they do not fit whole
  double gradients = 0;
  double optimizer = 0;    // fp32 master weights and two moments, sharded over all trainers
  double activations = 0;  // what each layer keeps for backward and has to be on the device
  double keys_and_values = 0;
  // What layers keep that may wait in host memory instead (resources.offload).
  double movable = 0;

  // Bytes on the device, with all on the host that may be there.
  double total() const { return weights + gradients + optimizer + activations + keys_and_values; }
};

// What the layers' choices take on a trainer; nothing of options that MakePlan refuses.
patterns::IndexMemory ChoiceMemory(const v1::JobSpec& spec, const model::ModelConfig& model,
                                   int64_t element_bytes);

MemoryEstimate EstimateMemory(const v1::JobSpec& spec, const model::ModelConfig& model,
                              const ClusterShape& cluster, v1::ParallelismSpec::Ring ring);

// Weights whose products backward computes again (resources.recompute; with auto by the policy that
// trainers with the cluster's memory choose, or with an H200's where that is not known), as a share
// of those that a token meets.
double RecomputedShare(const v1::JobSpec& spec, const model::ModelConfig& model,
                       const ClusterShape& cluster);

// The part of `movable` that has to wait in host memory: all with offload: host, else what the
// device has no room for.
double HostBytes(const MemoryEstimate& estimate, const v1::JobSpec& spec,
                 const ClusterShape& cluster);

// INVALID_ARGUMENT with the arithmetic if the estimate is more than a trainer has, on its device or
// as its share of the host.
absl::Status CheckMemory(const MemoryEstimate& estimate, const v1::JobSpec& spec,
                         const model::ModelConfig& model, const ClusterShape& cluster);

}  // namespace ringleader::planner
