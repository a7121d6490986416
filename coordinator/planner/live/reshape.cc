#include "coordinator/planner/live/reshape.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "coordinator/planner/candidates.h"
#include "coordinator/planner/cost/memory.h"
#include "coordinator/planner/deal/sample_steps.h"
#include "coordinator/planner/simulate/pricer.h"
#include "jobspec/values/attention_spec.h"

namespace ringleader::planner {
namespace {

constexpr double kStepsAhead = 100;
constexpr double kTimesItsCost = 2;
// Of a step: predictions of two shapes of one job are off by less from each other.
constexpr double kChance = 0.01;
// Shapes closer than this are a tie, which the earlier candidate wins.
constexpr double kTie = 0.005;

// Where documents are counted by powers of two, one has about so much of its bin's length.
constexpr double kShareOfBin = 0.75;

// Links that are slower than they were taken to be show in what ranks wait for. Halves their speed
// until the plan in force would wait as long as was seen, and returns how often; `pricer` reads
// `cluster`. Where next to nothing is waited for, links are as slow as they were found before,
// unless the plan in force would have had to wait for such.
absl::StatusOr<int> FitLinks(const ReshapeRequest& request, Pricer& pricer, ClusterShape* cluster) {
  constexpr double kNoticeable = 0.05, kExplained = 0.75;
  constexpr int kMostHalvings = 8;
  const double seen = request.taken.exposed_communication;
  const double noticeable = kNoticeable * request.taken.seconds;
  const GroupShape group = RingGroupOf(request.spec, *cluster);
  Link* const link = group.outer > 1 ? &cluster->inter_node : &cluster->intra_node;
  const double given = link->bytes_per_second;
  const auto waits = [&](int halvings) -> absl::StatusOr<double> {
    link->bytes_per_second = std::ldexp(given, -halvings);
    ASSIGN_OR_RETURN(const v1::Prediction now, pricer.Price(request.plan, request.costs));
    return now.exposed_communication_seconds() + now.wait_seconds();
  };
  int halvings = seen < noticeable ? request.link_halvings : 0;
  for (; seen < noticeable && halvings > 0; --halvings) {
    ASSIGN_OR_RETURN(const double predicted, waits(halvings));
    if (predicted < noticeable) return halvings;
  }
  for (; seen >= noticeable && halvings < kMostHalvings; ++halvings) {
    ASSIGN_OR_RETURN(const double predicted, waits(halvings));
    if (predicted >= kExplained * seen) return halvings;
  }
  link->bytes_per_second = std::ldexp(given, -halvings);
  return halvings;
}

// Whether prices in such a layout know the lengths of documents. They are compared with no others.
bool KnowsDocuments(v1::ParallelismSpec::Layout layout) {
  return layout == v1::ParallelismSpec::STRIPED || jobspec::IsByDocuments(layout);
}

// 0 of none.
double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

bool SameShape(const v1::StepPlan& a, const v1::StepPlan& b) {
  return a.layout() == b.layout() && a.stripe() == b.stripe() && !HasNewRing(a, b);
}

}  // namespace

StepsTaken MedianOf(std::span<const v1::StepReport> recent) {
  std::vector<double> seconds, exposed;
  for (const v1::StepReport& report : recent) {
    if (report.skipped()) continue;
    seconds.push_back(report.step_seconds());
    exposed.push_back(report.phases().exposed_communication());
  }
  return {.seconds = Median(std::move(seconds)),
          .exposed_communication = Median(std::move(exposed))};
}

std::vector<int64_t> DocumentsFrom(std::span<const v1::StepReport> recent, uint64_t tokens) {
  std::map<uint64_t, double, std::greater<>> counts;
  double all = 0;
  for (const v1::StepReport& report : recent) {
    for (const v1::DocumentReport& bin : report.documents()) {
      if (bin.tokens() == 0) continue;  // no trainer says so
      const double length = std::min(std::max(1.0, kShareOfBin * static_cast<double>(bin.tokens())),
                                     static_cast<double>(tokens));
      counts[bin.tokens()] += static_cast<double>(bin.count());
      all += static_cast<double>(bin.count()) * length;
    }
  }
  std::vector<int64_t> documents;
  double owed = 0;  // tokens of longer documents that made no whole one
  for (const auto& [bin, count] : counts) {
    const double length = std::max(1.0, kShareOfBin * static_cast<double>(bin));
    if (length >= static_cast<double>(tokens)) return {};
    owed += count * length / all * static_cast<double>(tokens);
    while (owed >= length) {
      documents.push_back(static_cast<int64_t>(length));
      owed -= length;
    }
  }
  if (documents.size() < 2) documents.clear();
  return documents;
}

absl::StatusOr<Reshaping> Reshape(const ReshapeRequest& request, const PlanLimits& limits) {
  const v1::JobSpec& spec = request.spec;
  ClusterShape cluster = request.cluster;
  const GroupShape group = RingGroupOf(spec, cluster);
  patterns::PatternHints hints = request.hints;
  if (!KnowsDocuments(request.plan.layout())) hints.document_tokens.clear();
  const bool by_documents = !hints.document_tokens.empty();
  ASSIGN_OR_RETURN(std::vector<Candidate> candidates, Candidates(spec, group, by_documents));
  if (by_documents) {
    std::erase_if(candidates,
                  [](const Candidate& candidate) { return !KnowsDocuments(candidate.layout); });
  }
  Reshaping result;
  if (!request.model.known()) return result;
  std::set<Pricer::Layout> layouts = {{request.plan.layout(), request.plan.stripe()}};
  for (const Candidate& candidate : candidates) {
    layouts.insert({candidate.layout, candidate.stripe});
  }
  // One more for the plan in force, and for links.
  RETURN_IF_ERROR(CheckCost(CostOf(spec, request.model, static_cast<int>(layouts.size()),
                                   2 * static_cast<int>(candidates.size() + 4)),
                            spec, limits));
  Pricer pricer(spec, request.model, cluster, hints, layouts);
  ASSIGN_OR_RETURN(result.link_halvings, FitLinks(request, pricer, &cluster));
  ASSIGN_OR_RETURN(const v1::Prediction now, pricer.Price(request.plan, request.costs));
  result.miss = request.taken.seconds / now.step_seconds();

  double least = request.taken.seconds * (1 - kChance);
  for (const Candidate& candidate : candidates) {
    if (limits.stop && limits.stop()) return absl::CancelledError("it took too long");
    v1::StepPlan plan = request.plan;
    Apply(candidate, spec, &plan);
    if (SameShape(plan, request.plan)) continue;
    const MemoryEstimate memory = EstimateMemory(spec, request.model, cluster, candidate.ring);
    if (!CheckMemory(memory, spec, request.model, cluster).ok()) continue;
    if (jobspec::IsByDocuments(candidate.layout)) {
      RETURN_IF_ERROR(WeighSamples(spec, request.model, request.costs, pricer, &plan));
    }
    ASSIGN_OR_RETURN(*plan.mutable_prediction(), pricer.Price(plan, request.costs));
    const auto known = request.misses.find(NameOf(plan));
    const double seconds = plan.prediction().step_seconds() *
                           (known == request.misses.end() ? result.miss : known->second);
    const double ahead = std::min(kStepsAhead, static_cast<double>(request.steps_left));
    const double gain = ahead * (request.taken.seconds - seconds);
    const double cost =
        HasNewRing(request.plan, plan) ? request.change_costs.ring : request.change_costs.layout;
    if (seconds >= least || gain <= kTimesItsCost * cost) continue;
    least = seconds * (1 - kTie);
    plan.clear_reasons();
    plan.add_reasons(absl::StrFormat(
        "%s in place of %s: a step is predicted to take %.4g s and took %.4g s, so that over the "
        "next %.0f steps %.4g s are gained for a change that costs %.4g s",
        NameOf(plan), NameOf(request.plan), seconds, request.taken.seconds, ahead, gain, cost));
    result.better = std::move(plan);
  }
  if (result.better.has_value() && jobspec::IsByDocuments(request.plan.layout()) &&
      !jobspec::IsByDocuments(result.better->layout())) {
    // The weights in force are of documents on a rank by themselves; a sample in stripes is on all.
    hints.document_tokens.clear();
    Pricer in_stripes(spec, request.model, cluster, hints, layouts);
    RETURN_IF_ERROR(WeighSamples(spec, request.model, request.costs, in_stripes, &*result.better));
  }
  return result;
}

}  // namespace ringleader::planner
