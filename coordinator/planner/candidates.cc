#include "coordinator/planner/candidates.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "jobspec/jobspec.h"
#include "jobspec/values/attention_spec.h"
#include "patterns/pattern.h"

namespace ringleader::planner {
namespace {

using v1::ParallelismSpec;

// Into whole tiles for every rank.
absl::StatusOr<ring::Division> DivisionOf(const v1::JobSpec& spec, ParallelismSpec::Layout layout,
                                          uint32_t stripe) {
  ring::Division division = {.ranks = jobspec::RingRanks(spec.parallelism()),
                             .tile = spec.attention().tile(),
                             .stripe = stripe,
                             .heads = jobspec::HeadRanks(spec.parallelism())};
  ASSIGN_OR_RETURN(division.layout, jobspec::LayoutOf(layout));
  division.by_documents = jobspec::IsByDocuments(layout);
  return division;
}

// Each takes a walk of the ring, which takes the square of its ranks.
constexpr uint32_t kMostRanksOfWindows = 1024;

// What a hierarchical ring may have for its inner one (the windows of LoongTrain's double ring,
// arXiv 2406.18485): the ranks of a node or equal parts of them, between which hops are many and
// fast. None larger: it would have more hops between nodes, not fewer.
std::vector<uint32_t> WindowsOf(const ParallelismSpec& asked, const GroupShape& group) {
  if (asked.ring_window() > 0) return {asked.ring_window()};
  const auto inner = static_cast<uint32_t>(group.inner);
  std::vector<uint32_t> windows = {inner};
  if (group.outer == 1 || jobspec::RingRanks(asked) > kMostRanksOfWindows) return windows;
  for (uint32_t window = inner / 2; window > 1; --window) {
    if (inner % window == 0) windows.push_back(window);
  }
  return windows;
}

}  // namespace

GroupShape RingGroupOf(const v1::JobSpec& spec, const ClusterShape& cluster) {
  return GroupOf(cluster, static_cast<int>(spec.parallelism().context()),
                 static_cast<int>(jobspec::HeadRanks(spec.parallelism())));
}

uint32_t StripeOf(const v1::JobSpec& spec) {
  if (spec.parallelism().stripe() != 0) return spec.parallelism().stripe();
  const uint32_t tile = spec.attention().tile();
  // Samples are filled up to whole stripes.
  if (spec.resources().engine() != v1::ResourcesSpec::CUDA ||
      spec.data().batching() == v1::DataSpec::SAMPLES) {
    return tile;
  }
  const auto options = jobspec::AttentionOptionsOf(spec.attention());
  if (!options.ok()) return tile;  // MakePlan() refuses them
  const patterns::PatternDefinition* const pattern = patterns::FindDefinition(options->pattern);
  if (pattern == nullptr || pattern->stripe_on_gpus == nullptr) return tile;
  const auto stripe = static_cast<uint32_t>(
      pattern->stripe_on_gpus(*options, static_cast<int64_t>(spec.data().sequence_length()),
                              static_cast<int>(jobspec::RingRanks(spec.parallelism()))));
  const auto division = DivisionOf(spec, ParallelismSpec::STRIPED, stripe);
  return division.ok() && jobspec::CheckSequencesDivide(spec, *division).ok() ? stripe : tile;
}

absl::StatusOr<std::vector<Candidate>> Candidates(const v1::JobSpec& spec, const GroupShape& group,
                                                  bool by_documents) {
  const ParallelismSpec& asked = spec.parallelism();
  const uint32_t tile = spec.attention().tile();
  if (jobspec::RingRanks(asked) == 1 && asked.layout() != ParallelismSpec::DOCUMENTS) {
    // What is gathered in groups of heads is gathered from nobody.
    const auto ring =
        jobspec::HeadGroups(asked) > 1 ? ParallelismSpec::ALL_GATHER : ParallelismSpec::FLAT;
    return std::vector<Candidate>{{ParallelismSpec::CONTIGUOUS, 0, ring, 1}};
  }
  std::vector<std::pair<ParallelismSpec::Layout, uint32_t>> layouts;
  const auto wanted = [&](ParallelismSpec::Layout layout) {
    return asked.layout() == layout || asked.layout() == ParallelismSpec::LAYOUT_UNSPECIFIED;
  };
  if (wanted(ParallelismSpec::STRIPED)) {
    layouts.emplace_back(ParallelismSpec::STRIPED, StripeOf(spec));
  }
  if (asked.layout() == ParallelismSpec::DOCUMENTS ||
      (by_documents && wanted(ParallelismSpec::DOCUMENTS) && jobspec::HeadRanks(asked) == 1 &&
       jobspec::HeadGroups(asked) == 1 && jobspec::TrainsAlikeByDocuments(spec))) {
    layouts.emplace_back(ParallelismSpec::DOCUMENTS, tile);
  }
  if (wanted(ParallelismSpec::ZIGZAG)) layouts.emplace_back(ParallelismSpec::ZIGZAG, 0);
  if (wanted(ParallelismSpec::CONTIGUOUS)) layouts.emplace_back(ParallelismSpec::CONTIGUOUS, 0);

  std::vector<Candidate> candidates;
  absl::Status refused;
  for (const auto& [layout, stripe] : layouts) {
    ASSIGN_OR_RETURN(const ring::Division division, DivisionOf(spec, layout, stripe));
    refused = jobspec::CheckSequencesDivide(spec, division);
    if (!refused.ok()) continue;
    for (const auto ring :
         {ParallelismSpec::FLAT, ParallelismSpec::HIERARCHICAL, ParallelismSpec::ALL_GATHER}) {
      if (asked.ring() != ring && asked.ring() != ParallelismSpec::RING_UNSPECIFIED) continue;
      if (jobspec::HeadGroups(asked) > 1 && ring != ParallelismSpec::ALL_GATHER) continue;
      if (ring == ParallelismSpec::HIERARCHICAL && (!group.regular || group.outer == 1) &&
          asked.ring() != ring) {
        continue;
      }
      if (ring != ParallelismSpec::HIERARCHICAL) {
        candidates.push_back({layout, stripe, ring, jobspec::RingRanks(asked)});
        continue;
      }
      for (const uint32_t window : WindowsOf(asked, group)) {
        candidates.push_back({layout, stripe, ring, window});
      }
    }
  }
  if (candidates.empty()) return refused;
  return candidates;
}

void Apply(const Candidate& candidate, const v1::JobSpec& spec, v1::StepPlan* plan) {
  plan->set_layout(candidate.layout);
  plan->set_stripe(candidate.stripe);
  v1::RingShape* ring = plan->mutable_ring();
  ring->set_kind(candidate.ring);
  ring->set_inner(candidate.window);
  ring->set_outer(jobspec::RingRanks(spec.parallelism()) / candidate.window);
}

bool HasNewRing(const v1::StepPlan& before, const v1::StepPlan& after) {
  return before.ring().kind() != after.ring().kind() ||
         before.ring().inner() != after.ring().inner() ||
         before.head_groups() != after.head_groups();
}

std::string NameOf(const v1::StepPlan& plan) {
  std::string name = jobspec::EnumText(plan.layout());
  if (plan.stripe() > 0) absl::StrAppendFormat(&name, "(%d)", plan.stripe());
  absl::StrAppend(&name, ", ", jobspec::EnumText(plan.ring().kind()));
  if (plan.ring().kind() == ParallelismSpec::HIERARCHICAL) {
    absl::StrAppendFormat(&name, "(%d)", plan.ring().inner());
  } else if (plan.head_groups() > 1) {
    absl::StrAppendFormat(&name, "(%d groups of heads)", plan.head_groups());
  }
  return name;
}

}  // namespace ringleader::planner
