// Decides how a job runs on the machines it was given: layout, stripe, ring, budgets and
// the weights of samples, with the reasons. Pure functions: no I/O, no clock, the same answer for
// the same input. The same code answers `ringctl plan` for clusters that need not exist.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/planner/cost/cost_model.h"
#include "coordinator/planner/cost/shapes.h"
#include "coordinator/planner/plan_cost.h"
#include "model_shape/model_config.h"
#include "patterns/sample.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::planner {

// The plan with which an attempt starts: version 1, effective from step 1. `spec` has been
// validated and has its defaults; what it leaves to the planner ("auto") is chosen by the predicted
// seconds of a step, as `cost_model` has them before any report. `hints`, from an earlier attempt's
// reports, make the prediction truer and leave the choice alone. `kept`: the plan of the attempt
// whose checkpoint this one resumes from; it gets that one's layout, ring and groups, if the nodes
// allow, so that it adds in the same order and has the same losses bit for bit, whatever was
// measured meanwhile. With an unknown model: the choice by pattern alone, and no prediction.
//
// INVALID_ARGUMENT, with the arithmetic, when no plan can work: the cluster holds too few trainers,
// heads or layers do not fit the model, the asked-for ring does not fit the nodes, or memory is
// short. RESOURCE_EXHAUSTED when the plan itself would take more than `limits`. Takes seconds for
// 8,192 ranks in a ring, and grows with their square.
absl::StatusOr<v1::StepPlan> MakePlan(const v1::JobSpec& spec, const model::ModelConfig& model,
                                      const ClusterShape& cluster, const CostModel& cost_model,
                                      const patterns::PatternHints& hints = {},
                                      const PlanLimits& limits = {},
                                      const v1::StepPlan* kept = nullptr);

// What a step is predicted to cost under `plan`. `hints` come from reports, if there are any.
// INVALID_ARGUMENT names an enumerator of `spec` or `plan` that is unknown.
absl::StatusOr<v1::Prediction> Predict(const v1::JobSpec& spec, const model::ModelConfig& model,
                                       const ClusterShape& cluster, const CostModel& cost_model,
                                       const v1::StepPlan& plan,
                                       const patterns::PatternHints& hints = {});

// What the job's reports say of what its sparse layers visit; zeros where that is known without
// them (dense attention, a window).
patterns::PatternHints HintsFrom(const v1::JobSpec& spec, std::span<const v1::StepReport> recent);

}  // namespace ringleader::planner
