// How many trainers may share out heads, where the job file leaves it to the planner
// (parallelism.heads: 0).
#pragma once

#include <string>
#include <vector>

#include "model_shape/model_config.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::planner {

struct HeadChoices {
  std::vector<v1::JobSpec> jobs = {};      // with one number each, ascending from 1
  std::vector<std::string> refusals = {};  // why not the others into which heads divide, for people
};

// The job itself where it gives a number. With `kept`, an earlier attempt's plan, that one's number
// alone; with an unknown model 1 alone.
HeadChoices HeadChoicesOf(const v1::JobSpec& spec, const model::ModelConfig& model,
                          const v1::StepPlan* kept);

}  // namespace ringleader::planner
