// What the lifecycle asks of the planner: a seam, so that tests need no cost model.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/store/store.h"
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/latency.pb.h"
#include "ringleader/v1/node.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::lifecycle {

struct PlanRequest {
  v1::JobSpec spec;
  std::string owner = {};  // of the job, or who asks for the preview: they take turns
  // The shape that the job's record holds; unset in jobs of earlier releases.
  std::optional<v1::ModelShape> shape = {};
  std::vector<v1::Placement> placements = {};
  std::vector<v1::NodeInventory> nodes = {};  // of each placement, in order
  // The plan of the attempt whose checkpoint the next one resumes from: it adds in the same order.
  std::optional<v1::StepPlan> kept = {};
  // The newest change of `kept` came too late for that attempt, which ended before it was
  // withdrawn.
  bool kept_was_missed = false;
  bool is_preview = false;  // nothing starts with it
  // True once something has overtaken the plan: whatever comes of it is not looked at. May be null.
  std::shared_ptr<const std::atomic<bool>> is_overtaken = nullptr;
};

struct MadePlan {
  v1::StepPlan plan;
  v1::ModelShape shape;  // what the plan goes by
};

// Called by one thread at a time, and never waits.
class PlanSource {
 public:
  // Takes any thread's call, also before Plan() has returned.
  using Done = std::function<void(absl::StatusOr<MadePlan>)>;

  virtual ~PlanSource() = default;

  // Plans in the background how an attempt starts, from what is known of the job now, and calls
  // `done` once. An error is final: the job has to change. Only a preview may be turned away with
  // RESOURCE_EXHAUSTED because others of its owner are being made.
  virtual void Plan(PlanRequest request, Done done) = 0;

  // An attempt of `job`, its last, begins under `plan`. Plans that were made for a preview, or that
  // something has overtaken, never come to this.
  virtual void Started(const v1::Job& job, const v1::StepPlan& plan,
                       const std::vector<v1::NodeInventory>& nodes) {}

  // The same for an attempt that began under an earlier coordinator: `plan` is the newest, and
  // `reports` are of its last steps, oldest first.
  virtual void Restored(const v1::Job& /*job*/, const v1::StepPlan& /*plan*/,
                        const std::vector<v1::NodeInventory>& /*nodes*/,
                        const std::vector<v1::StepReport>& /*reports*/) {}

  // What is known of the machines, from now on.
  virtual void Measured(std::shared_ptr<const store::MeasurementList> measured) = 0;
  // What the next attempt is to measure before its first step; without a budget: nothing.
  virtual v1::MeasureRequest WhatToMeasure(const v1::Job& /*job*/) { return {}; }
  // What is to be kept of what an attempt of `job` measured on the node. INVALID_ARGUMENT says why
  // nothing is.
  virtual absl::StatusOr<v1::Measurements> Check(const v1::Job& /*job*/,
                                                 const v1::NodeInventory& /*node*/,
                                                 const v1::Measurements& /*measured*/) {
    return absl::InvalidArgumentError("nothing was to be measured");
  }

  // One completed step of a running job, merged over ranks. Returns a plan for later steps when it
  // is worth a change.
  virtual std::optional<v1::StepPlan> Observe(const v1::Job& job, const v1::StepReport& merged) = 0;
  // Of a running job: ranks that take longer than others for the same work, without their nodes.
  virtual std::vector<v1::SlowRank> SlowRanks(const v1::Job& /*job*/) { return {}; }
  // The job ended: forget what was learned for it alone.
  virtual void Forget(const v1::Job& job) = 0;
};

}  // namespace ringleader::lifecycle
