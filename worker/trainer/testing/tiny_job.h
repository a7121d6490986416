// A job small enough to train in a test, as its worker would send it.
#pragma once

#include <string>

#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"
#include "worker/trainer/testing/tiny_files.h"

namespace ringleader::trainer::testing {

// Writes its files (tiny_files.h) into `directory`; the job trains there with context * data ranks,
// 6 steps of 2 sequences, vertical-slash attention, a checkpoint every 2 steps.
v1::JobSpec TinyJob(const std::string& directory, int context, int data = 1);

// The plan that the planner would make: a flat ring, stripes of one tile.
v1::StepPlan TinyPlan(const v1::JobSpec& spec);

}  // namespace ringleader::trainer::testing
