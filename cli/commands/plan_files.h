// What `ringctl plan` reads besides the job: lengths of samples, what trainers measured of the
// machines, steps that a job took. Errors name the file, and the line where there is one, or the
// flag that asked the coordinator.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/client.h"
#include "coordinator/planner/cost/measured.h"
#include "coordinator/planner/cost/shapes.h"
#include "coordinator/planner/planner.h"
#include "model_shape/model_config.h"
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/node_service.pb.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::cli {

// Tokens of a sample each, one a line; blank lines do not count.
absl::StatusOr<std::vector<uint64_t>> ReadLengths(const std::string& file);

// Those of data.train, as trainers would read it.
absl::StatusOr<std::vector<uint64_t>> PackedLengths(const v1::DataSpec& spec);

struct MeasuredMachine {
  balance::LatencyTable table;  // of the job's attention; empty: not measured
  std::string text = {};        // what was found, for people
};

// What `ringctl latency -o json` printed.
absl::StatusOr<v1::ListLatencyResponse> ReadMeasured(const std::string& file);

// From what trainers measured: of `device` or, if that is empty, of the only one in it. Sets the
// links of `cluster` that were measured. `source` names `all` in errors.
absl::StatusOr<MeasuredMachine> UseMeasured(const v1::ListLatencyResponse& all,
                                            const std::string& source, const std::string& device,
                                            const v1::JobSpec& spec,
                                            const model::ModelConfig& model,
                                            planner::ClusterShape* cluster);

// What a job's newest reports say.
struct JobReports {
  v1::Job job;  // with its defaults
  patterns::PatternHints hints;
  std::vector<double> step_seconds = {};       // of all its steps, in order
  std::optional<v1::ProbedRecall> probe = {};  // the newest
};

// Of the job `name` at the coordinator; NOT_FOUND without it.
absl::StatusOr<JobReports> ReadReports(Client* client, const std::string& name);

// How long each step took, by what `ringctl history JOB -o jsonl` printed: at least one.
absl::StatusOr<std::vector<double>> ReadStepSeconds(const std::string& file);

// How far off the prediction is the median of measured steps, a third of which warm up.
std::string CompareSteps(std::vector<double> step_seconds, double predicted_seconds);

}  // namespace ringleader::cli
