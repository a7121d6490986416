#include "coordinator/planner/head_choices.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "jobspec/values/attention_spec.h"
#include "jobspec/values/model_spec.h"
#include "ring/head_shares.h"

namespace ringleader::planner {
namespace {

// Ways multiply with them, and what they are compared by takes memory for each rank.
constexpr uint32_t kMostRanksOfGroups = 1024;

v1::JobSpec WithHeads(const v1::JobSpec& spec, uint32_t heads) {
  v1::JobSpec with = spec;
  with.mutable_parallelism()->set_heads(heads);
  return with;
}

v1::JobSpec WithGroups(const v1::JobSpec& spec, uint32_t groups) {
  v1::JobSpec with = spec;
  with.mutable_parallelism()->set_head_groups(groups);
  return with;
}

// What a job with this number would be refused for.
absl::Status CheckChoice(const v1::JobSpec& spec, const model::ModelConfig& model) {
  RETURN_IF_ERROR(jobspec::CheckHeadRanks(spec));
  RETURN_IF_ERROR(jobspec::CheckModelsHeads(spec, model));
  const uint32_t window = spec.parallelism().ring_window();
  const uint32_t ring = jobspec::RingRanks(spec.parallelism());
  if (window == 0 || ring % window == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "parallelism.ring_window: %d does not divide the %d trainers of the ring", window, ring));
}

// How many trainers share out heads.
HeadChoices RanksOf(const v1::JobSpec& spec, const model::ModelConfig& model,
                    const v1::StepPlan* kept) {
  if (!jobspec::PicksHeads(spec.parallelism())) return {.jobs = {spec}};
  if (kept != nullptr && kept->heads() > 0) return {.jobs = {jobspec::PlannedJob(spec, *kept)}};
  HeadChoices choices = {.jobs = {WithHeads(spec, 1)}};
  if (!model.known()) return choices;
  const uint32_t context = spec.parallelism().context();
  for (uint32_t heads = 2; heads <= context && heads <= model.heads; ++heads) {
    const ring::HeadShares shares = {
        .ranks = static_cast<int>(heads), .heads = model.heads, .kv_heads = model.kv_heads};
    if (context % heads != 0 || !ring::CheckHeadShares(shares).ok()) continue;
    const v1::JobSpec with = WithHeads(spec, heads);
    if (const absl::Status refused = CheckChoice(with, model); refused.ok()) {
      choices.jobs.push_back(with);
    } else {
      choices.refusals.push_back(absl::StrCat("heads are not shared out among ", heads, ": ",
                                              std::string(refused.message())));
    }
  }
  return choices;
}

}  // namespace

HeadChoices HeadChoicesOf(const v1::JobSpec& spec, const model::ModelConfig& model,
                          const v1::StepPlan* kept) {
  HeadChoices ranks = RanksOf(spec, model, kept);
  if (!jobspec::PicksHeadGroups(spec.parallelism())) return ranks;
  HeadChoices choices = {.refusals = std::move(ranks.refusals)};
  for (const v1::JobSpec& job : ranks.jobs) {
    const v1::ParallelismSpec& asked = job.parallelism();
    if (kept != nullptr) {
      choices.jobs.push_back(WithGroups(job, std::max(1u, kept->head_groups())));
      continue;
    }
    choices.jobs.push_back(WithGroups(job, 1));
    const bool may_gather = asked.ring() == v1::ParallelismSpec::ALL_GATHER ||
                            asked.ring() == v1::ParallelismSpec::RING_UNSPECIFIED;
    const uint32_t ring = jobspec::RingRanks(asked);
    if (!model.known() || !may_gather || ring == 1 || ring > kMostRanksOfGroups) continue;
    for (const uint32_t groups : {2, 4, 8}) {
      v1::JobSpec with = WithGroups(job, groups);
      if (CheckChoice(with, model).ok()) choices.jobs.push_back(std::move(with));
    }
  }
  return choices;
}

}  // namespace ringleader::planner
