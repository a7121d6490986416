// A job small enough to train in a test, with its files: a Qwen2 model of two layers and a few
// thousand tokens of text.
#pragma once

#include <string>

#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::trainer::testing {

inline constexpr int kTinySequence = 512;  // tokens

// Writes config.json, train/ and eval/ into `directory`; the job trains there with context * data
// ranks, 6 steps of 2 sequences, vertical-slash attention, a checkpoint every 2 steps.
v1::JobSpec TinyJob(const std::string& directory, int context, int data = 1);

// As the planner would: a flat ring, stripes of one tile.
v1::StepPlan TinyPlan(const v1::JobSpec& spec);

}  // namespace ringleader::trainer::testing
