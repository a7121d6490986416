// What `ringctl plan` reads besides the job: lengths of samples, what trainers measured of the
// machines, steps that a job took. Errors name the file, and the line where there is one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/planner/cost/measured.h"
#include "coordinator/planner/cost/shapes.h"
#include "model_shape/model_config.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::cli {

// Tokens of a sample each, one a line; blank lines do not count.
absl::StatusOr<std::vector<uint64_t>> ReadLengths(const std::string& file);

// Those of data.train, as trainers would read it.
absl::StatusOr<std::vector<uint64_t>> PackedLengths(const v1::DataSpec& spec);

struct MeasuredMachine {
  balance::LatencyTable table;  // of the job's attention; empty: not measured
  std::string text = {};        // what was found, for people
};

// From what `ringctl latency -o json` printed: of `device` or, if that is empty, of the only one in
// it. Sets the links of `cluster` that were measured.
absl::StatusOr<MeasuredMachine> ReadMeasured(const std::string& file, const std::string& device,
                                             const v1::JobSpec& spec,
                                             const model::ModelConfig& model,
                                             planner::ClusterShape* cluster);

// How long a step was predicted to take and took, by what `ringctl history JOB -o jsonl` printed:
// the median of its steps, a third of which warm up.
absl::StatusOr<std::string> CompareSteps(const std::string& file, double predicted_seconds);

}  // namespace ringleader::cli
