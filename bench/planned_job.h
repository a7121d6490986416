// What trainers get of a job file, planned by what was measured, for benches that train in their
// own process.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "balance/measurements.h"
#include "balance/sample_weights.h"
#include "worker/attention/stats/attention_stats.h"
#include "worker/trainer/host.h"
#include "worker/trainer/training_job.h"

namespace ringleader::bench {

// Reads the job of `path` as rank 0 of an attempt on one machine gets it. `measured`: a file in the
// form of `ringctl latency -o json`, from which the plan has its weights; where there is none yet,
// at the machine's usual speed.
absl::StatusOr<trainer::TrainingJob> LoadPlannedJob(const std::string& path,
                                                    const std::string& measured);

// What a step's micro-batches visited, by the bin of their length (SampleWeights::BinOf).
using VisitedByLength = std::map<uint64_t, attention::VisitedTiles>;

// Returns the weights that the job goes on with after steps which visited this.
absl::StatusOr<balance::SampleWeights> Reweighed(const std::string& path,
                                                 const std::string& measured,
                                                 std::span<const VisitedByLength> steps);

// Whether the file has rows of the job's attention.
absl::StatusOr<bool> IsMeasured(const std::string& path, const std::string& measured);

// Adds rows of the job's attention to the file, in that form.
absl::Status KeepMeasured(const std::string& path, const balance::Measurements& rows,
                          const std::string& measured);

// The step as `ringctl watch -o json` prints it, in one line.
std::string ToJson(const trainer::StepRecord& record);

}  // namespace ringleader::bench
