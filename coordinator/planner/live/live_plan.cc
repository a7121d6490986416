#include "coordinator/planner/live/live_plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "coordinator/planner/candidates.h"
#include "coordinator/planner/deal/plan_history.h"
#include "coordinator/planner/deal/reweigh.h"
#include "jobspec/values/attention_spec.h"

namespace ringleader::planner {
namespace {

constexpr uint64_t kMostLeadFactor = 64;
constexpr uint64_t kStepsBetweenLooks = 32;
constexpr double kNewestStep = 0.1;   // of the moving average of a step's seconds
constexpr uint32_t kNoticeable = 50;  // thousandths of a group's speed

// What a change is taken to cost before one was made. A layout is other positions for tokens: on
// two H100 no more than the spread of steps was seen. Another ring makes connections.
constexpr double kUsualLayoutChange = 0.25;      // of a step
constexpr double kUsualRingChange[] = {0.1, 2};  // seconds besides a step: CPU, GPU

bool Alike(const google::protobuf::RepeatedField<uint32_t>& a, const std::vector<uint32_t>& b) {
  const auto speed = [](const auto& of, size_t group) {
    return group < static_cast<size_t>(of.size()) ? of[static_cast<int>(group)] : 1000;
  };
  const size_t groups = std::max<size_t>(a.size(), b.size());
  for (size_t i = 0; i < groups; ++i) {
    const uint32_t before = speed(a, i), after = i < b.size() ? b[i] : 1000;
    if (std::max(before, after) - std::min(before, after) >= kNoticeable) return false;
  }
  return true;
}

}  // namespace

v1::StepPlan WithoutNewestChange(const v1::StepPlan& plan) {
  v1::StepPlan before = plan;
  if (before.weights_from_step() == plan.effective_step() && before.earlier_weights_size() > 0) {
    const v1::EarlierWeights last = *before.earlier_weights().rbegin();
    before.mutable_earlier_weights()->RemoveLast();
    before.set_weights_from_step(last.from_step());
    *before.mutable_sample_weights() = last.sample_weights();
    *before.mutable_group_permille() = last.group_permille();
  }
  if (before.shape_from_step() == plan.effective_step() && before.earlier_shapes_size() > 0) {
    const v1::EarlierShape last = *before.earlier_shapes().rbegin();
    before.mutable_earlier_shapes()->RemoveLast();
    before.set_shape_from_step(last.from_step());
    *before.mutable_ring() = last.ring();
    before.set_layout(last.layout());
    before.set_stripe(last.stripe());
  }
  return before;
}

LivePlan::LivePlan(const v1::JobSpec& spec, v1::StepPlan plan, const v1::StepReport* last,
                   bool may_change)
    : spec_(spec),
      may_change_(may_change),
      plan_(std::move(plan)),
      slow_(spec_.resources().trainers()),
      learned_(plan_.learned()) {
  const bool is_dated =
      plan_.effective_step() > 1 &&
      plan_.effective_step() == std::max(plan_.weights_from_step(), plan_.shape_from_step());
  is_taken_ = last == nullptr || !is_dated || last->plan_version() >= plan_.version();
  if (last == nullptr || !is_dated || plan_.shape_from_step() != plan_.effective_step()) return;
  changing_ = {.step = plan_.effective_step(),
               .has_new_ring = HasNewRing(WithoutNewestChange(plan_), plan_),
               .seconds = {}};
}

void LivePlan::Relearn(const v1::StepReport& report) {
  slow_.Observe(report);
  LearnWhatAChangeCosts(report);
}

uint64_t LivePlan::StepsLeft(const v1::StepReport& report) const {
  const uint64_t first = report.step() + LeadSteps(report.step_seconds());
  return spec_.training().steps() - std::min(spec_.training().steps(), first - 1);
}

bool LivePlan::MayChangeSoon(const v1::StepReport& report) const {
  const uint64_t changed = std::max(plan_.weights_from_step(), plan_.shape_from_step());
  return report.step() >= changed + StepsBetweenChanges(spec_) && StepsLeft(report) > 0;
}

uint64_t LivePlan::LeadSteps(double step_seconds) const {
  return lead_factor_ * planner::LeadSteps(step_seconds);
}

v1::StepPlan LivePlan::Next(const v1::StepReport& report) const {
  v1::StepPlan next = plan_;
  next.set_version(plan_.version() + 1);
  next.set_effective_step(report.step() + LeadSteps(report.step_seconds()));
  next.clear_reasons();
  next.clear_prediction();
  *next.mutable_learned() = learned_;
  return next;
}

bool LivePlan::IsTaken(const v1::StepReport& report, std::optional<v1::StepPlan>* withdrawal) {
  if (report.plan_version() > plan_.version()) {
    // A plan that is not known here: the coordinator's record was put back to an earlier state.
    is_left_alone_ = true;
    return false;
  }
  if (!is_taken_ && report.plan_version() == plan_.version()) {
    is_taken_ = true;
    is_withdrawn_ = false;
  }
  if (is_taken_ || report.step() < plan_.effective_step()) return is_taken_;
  changing_.reset();
  if (is_withdrawn_) {
    is_left_alone_ = true;
    return false;
  }
  lead_factor_ = std::min(2 * lead_factor_, kMostLeadFactor);
  const uint64_t missed = plan_.version(), step = plan_.effective_step();
  plan_ = WithoutNewestChange(plan_);
  plan_.set_version(missed);
  plan_ = Next(report);
  plan_.add_reasons(absl::StrFormat(
      "plan %d was to change step %d, but ranks had not taken it by then: what was before stays",
      missed, step));
  is_withdrawn_ = true;
  *withdrawal = plan_;
  return false;
}

void LivePlan::LearnWhatAChangeCosts(const v1::StepReport& report) {
  const double seconds = report.step_seconds();
  // Ranks that trained the step by an earlier plan have not changed anything.
  if (changing_ && report.step() >= changing_->step && report.plan_version() == plan_.version()) {
    mean_seconds_ = 0;
    if (report.step() == changing_->step) {
      changing_->seconds = seconds;
      return;  // it is like no other
    }
    // The shape before may have been slower or faster: the step after tells what one takes.
    if (changing_->seconds.has_value()) {
      const double cost = std::max(0.0, *changing_->seconds - seconds);
      if (changing_->has_new_ring) {
        learned_.set_ring_change_seconds(cost);
      } else {
        learned_.set_layout_change_seconds(cost);
      }
    }
    changing_.reset();
  }
  mean_seconds_ += (mean_seconds_ == 0 ? 1 : kNewestStep) * (seconds - mean_seconds_);
}

ChangeCosts LivePlan::change_costs() const {
  const bool cuda = spec_.resources().engine() == v1::ResourcesSpec::CUDA;
  return {.layout = learned_.has_layout_change_seconds() ? learned_.layout_change_seconds()
                                                         : kUsualLayoutChange * mean_seconds_,
          .ring = learned_.has_ring_change_seconds()
                      ? learned_.ring_change_seconds()
                      : kUsualRingChange[cuda ? 1 : 0] + mean_seconds_};
}

bool LivePlan::WantsShape(const v1::StepReport& report) {
  if (!may_change_ || !is_taken_ || is_left_alone_ ||
      jobspec::RingRanks(spec_.parallelism()) == 1 || !MayChangeSoon(report) ||
      report.step() < looked_at_ + kStepsBetweenLooks) {
    return false;
  }
  looked_at_ = report.step();
  return true;
}

void LivePlan::TakeShape(uint64_t version, Reshaping found) {
  if (version != plan_.version()) return;
  (*learned_.mutable_misses())[NameOf(plan_)] = found.miss;
  learned_.set_link_halvings(found.link_halvings);
  better_ = std::move(found.better);
}

void LivePlan::GoOnFrom(const LivePlan& earlier) {
  learned_ = earlier.learned_;
}

void LivePlan::ChangeSpeeds(const v1::StepReport& report, std::optional<v1::StepPlan>* next) const {
  const uint32_t groups = spec_.parallelism().data();
  if (groups < 2 || spec_.data().batching() != v1::DataSpec::SAMPLES ||
      spec_.data().dealing() == v1::DataSpec::IN_ORDER || !slow_.know()) {
    return;
  }
  const std::vector<uint32_t> permille = slow_.GroupPermille(groups);
  if (Alike(plan_.group_permille(), permille)) return;
  if (!next->has_value()) {
    *next = Next(report);
    DateWeights(plan_, &**next);
  }
  (*next)->mutable_group_permille()->Assign(permille.begin(), permille.end());
  const std::string slow =
      absl::StrJoin(slow_.List(), ", ", [](std::string* out, const v1::SlowRank& rank) {
        absl::StrAppendFormat(out, "rank %d takes %.2f x as long as others", rank.rank(),
                              rank.ratio());
      });
  (*next)->add_reasons(slow.empty()
                           ? "no rank is slow any more: groups get alike"
                           : absl::StrFormat("groups get by their speed: %s, for 50 steps", slow));
}

void LivePlan::ChangeShape(const v1::StepReport& report, std::optional<v1::StepPlan>* next) {
  const std::optional<v1::StepPlan> better = std::exchange(better_, std::nullopt);
  if (!better.has_value()) return;
  const bool is_dated = next->has_value();
  if (!is_dated) *next = Next(report);
  v1::StepPlan& plan = **next;
  DateShape(plan_, &plan);
  *plan.mutable_ring() = better->ring();
  plan.set_layout(better->layout());
  plan.set_stripe(better->stripe());
  *plan.mutable_prediction() = better->prediction();
  // Documents are laid out by weights of one on a rank by itself, which stripes have none of; those
  // of samples in stripes are of a micro-batch on all ranks.
  const bool are_others =
      plan.sample_weights().empty() ||
      jobspec::IsByDocuments(better->layout()) != jobspec::IsByDocuments(plan_.layout());
  if (are_others && !better->sample_weights().empty()) {
    if (!is_dated) DateWeights(plan_, &plan);
    *plan.mutable_sample_weights() = better->sample_weights();
  }
  for (const std::string& reason : better->reasons()) plan.add_reasons(reason);
  changing_ = {
      .step = plan.effective_step(), .has_new_ring = HasNewRing(plan_, plan), .seconds = {}};
}

std::optional<v1::StepPlan> LivePlan::Observe(const v1::StepReport& report, absl::Duration age,
                                              const balance::LengthDensities& densities,
                                              const balance::LatencyTable& measured) {
  slow_.Observe(report);
  LearnWhatAChangeCosts(report);
  std::optional<v1::StepPlan> next;
  if (is_left_alone_ || !IsTaken(report, &next) || !may_change_) return next;
  const auto lead = static_cast<double>(LeadSteps(report.step_seconds()));
  if (!MayChangeSoon(report) || age > lead * absl::Seconds(report.step_seconds())) {
    return std::nullopt;
  }
  next = ReplanWeights(spec_, plan_, report, densities, measured);
  if (next.has_value()) {
    next->set_effective_step(report.step() + LeadSteps(report.step_seconds()));
    next->set_weights_from_step(next->effective_step());
    *next->mutable_learned() = learned_;
  }
  ChangeSpeeds(report, &next);
  ChangeShape(report, &next);
  if (!next.has_value()) return std::nullopt;
  plan_ = *next;
  is_taken_ = false;
  return next;
}

}  // namespace ringleader::planner
