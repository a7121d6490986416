// The plan of a running attempt: what it is, what has been announced, and what changes it next.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "balance/latency_table.h"
#include "balance/length_densities.h"
#include "coordinator/planner/live/reshape.h"
#include "coordinator/planner/live/slow_ranks.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::planner {

// One change is under way at a time. It is announced some steps ahead of the first that it changes;
// ranks take it together, or refuse it together because it reached them too late. What they do,
// their reports say (StepReport.plan_version): a change that they did not take is withdrawn, and
// the next is announced twice as far ahead. Ranks that do not even take the withdrawal, or that go
// by a plan newer than any that is known here, are left alone.
class LivePlan {
 public:
  // `plan`: the newest, with what was learned before it. `last`: the newest report of an attempt
  // that began under an earlier coordinator; null: the attempt begins. `may_change`: plans may
  // change the order of sums.
  LivePlan(const v1::JobSpec& spec, v1::StepPlan plan, const v1::StepReport* last, bool may_change);

  const v1::StepPlan& plan() const { return plan_; }

  // Takes in a merged report, of a step that ended `age` ago. Returns the plan to announce, if
  // there is a change to make. Nothing new follows from a report that was under way for longer than
  // a change is announced ahead: ranks have long trained the step that it would be dated.
  std::optional<v1::StepPlan> Observe(const v1::StepReport& report, absl::Duration age,
                                      const balance::LengthDensities& densities,
                                      const balance::LatencyTable& measured);

  // Takes in a report from which nothing is to follow: of before the coordinator was restarted.
  void Relearn(const v1::StepReport& report);

  // Takes over what an earlier attempt on the same machines showed: what its shapes missed, of its
  // links, and what changes cost.
  void GoOnFrom(const LivePlan& earlier);

  std::vector<v1::SlowRank> slow_ranks() const { return slow_.List(); }

  // Whether a better shape is to be looked for now, with what the request wants to know of earlier
  // shapes. Asked at most once in some steps.
  bool WantsShape(const v1::StepReport& report);
  std::map<std::string, double> misses() const {
    return {learned_.misses().begin(), learned_.misses().end()};
  }
  int link_halvings() const { return learned_.link_halvings(); }
  ChangeCosts change_costs() const;
  // Steps that a change would have before the job ends if it were announced now.
  uint64_t StepsLeft(const v1::StepReport& report) const;
  // What came of it, for the plan of that version; part of the next Observe.
  void TakeShape(uint64_t version, Reshaping found);

 private:
  // Whether `plan_` is in force; sets `*withdrawal` where it never will be.
  bool IsTaken(const v1::StepReport& report, std::optional<v1::StepPlan>* withdrawal);
  // Whether long enough ago something changed, and the job does not end before something could.
  bool MayChangeSoon(const v1::StepReport& report) const;
  void LearnWhatAChangeCosts(const v1::StepReport& report);
  v1::StepPlan Next(const v1::StepReport& report) const;
  uint64_t LeadSteps(double step_seconds) const;
  void ChangeSpeeds(const v1::StepReport& report, std::optional<v1::StepPlan>* next) const;
  void ChangeShape(const v1::StepReport& report, std::optional<v1::StepPlan>* next);

  const v1::JobSpec spec_;
  const bool may_change_;
  v1::StepPlan plan_;
  bool is_taken_ = true;
  bool is_withdrawn_ = false;  // plan_ takes a change back
  bool is_left_alone_ = false;
  uint64_t lead_factor_ = 1;
  SlowRanks slow_;
  uint64_t looked_at_ = 0;  // the step of the last look for a better shape
  std::optional<v1::StepPlan> better_;
  v1::LearnedShapes learned_;
  double mean_seconds_ = 0;  // of a step
  struct Changing {
    uint64_t step = 0;  // the first of a shape that is announced
    bool has_new_ring = false;
    std::optional<double> seconds;  // that it took
  };
  std::optional<Changing> changing_;
};

// The plan without its newest change: with what it says of the steps before effective_step.
v1::StepPlan WithoutNewestChange(const v1::StepPlan& plan);

}  // namespace ringleader::planner
