// A plan source for tests of what surrounds the planner: version 1 for every attempt, made at once
// unless `held` is set, never revised.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/lifecycle/planning/plan_source.h"

namespace ringleader::lifecycle::testing {

class FixedPlan : public PlanSource {
 public:
  void Plan(PlanRequest request, Done done) override {
    if (held) {
      waiting.push_back({std::move(request), std::move(done)});
      ++asked;
      return;
    }
    ++asked;
    done(Made());
  }
  static MadePlan Made() {
    MadePlan made;
    made.plan.set_version(1);
    return made;
  }
  std::optional<v1::StepPlan> Observe(const v1::Job&, const v1::StepReport& merged) override {
    observed.push_back(merged.step());
    return std::exchange(next, std::nullopt);
  }
  std::vector<v1::SlowRank> SlowRanks(const v1::Job&) override { return slow; }
  void Started(const v1::Job& job, const v1::StepPlan&,
               const std::vector<v1::NodeInventory>& nodes) override {
    started.push_back(job.name());
    started_on = nodes;
  }
  void Forget(const v1::Job& job) override { forgotten.push_back(job.name()); }
  void Restored(const v1::Job&, const v1::StepPlan& plan,
                const std::vector<v1::NodeInventory>& nodes,
                const std::vector<v1::StepReport>& reports) override {
    restored = plan;
    restored_on = nodes;
    relearned = reports;
  }
  void Measured(std::shared_ptr<const store::MeasurementList> list) override {
    measured = std::move(list);
  }
  v1::MeasureRequest WhatToMeasure(const v1::Job&) override {
    v1::MeasureRequest request;
    request.set_budget_milliseconds(7000);
    return request;
  }
  // Believes what was measured of "believed" devices.
  absl::StatusOr<v1::Measurements> Check(const v1::Job&, const v1::NodeInventory&,
                                         const v1::Measurements& reported) override {
    if (reported.layers().machine().device() == "believed") return reported;
    return absl::InvalidArgumentError("a device that its node has not");
  }

  // What was asked while `held`, for tests to answer; `asked` says when.
  struct Waiting {
    PlanRequest request;
    Done done;
  };
  bool held = false;
  std::optional<v1::StepPlan> next = {};  // announced with the next step
  std::vector<v1::SlowRank> slow = {};    // of every job
  std::optional<v1::StepPlan> restored = {};
  std::vector<v1::StepReport> relearned = {};
  std::vector<uint64_t> observed = {};          // steps, in order
  std::vector<std::string> started, forgotten;  // jobs, in order
  std::vector<v1::NodeInventory> started_on, restored_on;
  std::shared_ptr<const store::MeasurementList> measured = nullptr;
  std::vector<Waiting> waiting;
  std::atomic<int> asked = 0;
};

}  // namespace ringleader::lifecycle::testing
