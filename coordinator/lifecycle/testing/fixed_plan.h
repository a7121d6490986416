// A plan source for tests of what surrounds the planner: version 1 for every attempt, made at once
// unless `held` is set, never revised.
#pragma once

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "coordinator/lifecycle/plan_source.h"

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
  std::optional<v1::StepPlan> Observe(const v1::Job&, const v1::StepReport&) override {
    return std::nullopt;
  }
  void Forget(const v1::Job&) override {}

  // What was asked while `held`, for tests to answer; `asked` says when.
  struct Waiting {
    PlanRequest request;
    Done done;
  };
  bool held = false;
  std::vector<Waiting> waiting;
  std::atomic<int> asked = 0;
};

}  // namespace ringleader::lifecycle::testing
