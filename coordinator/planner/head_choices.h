// How many trainers may share out heads, and in how many groups of heads keys may be gathered,
// where the job file leaves it to the planner (parallelism.heads: 0, parallelism.head_groups: 0).
#pragma once

#include <string>
#include <vector>

#include "model_shape/model_config.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::planner {

struct HeadChoices {
  std::vector<v1::JobSpec> jobs = {};      // with one number of each, ascending from 1
  std::vector<std::string> refusals = {};  // why no other numbers of trainers, for people
};

// The job itself where it gives numbers. With `kept`, an earlier attempt's plan, that one's alone;
// with an unknown model 1 alone. Groups are left out where the model or the job does not allow
// them.
HeadChoices HeadChoicesOf(const v1::JobSpec& spec, const model::ModelConfig& model,
                          const v1::StepPlan* kept);

}  // namespace ringleader::planner
