#include "coordinator/planner/head_choices.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "jobspec/values/attention_spec.h"
#include "patterns/check_options.h"
#include "ring/head_shares.h"

namespace ringleader::planner {
namespace {

v1::JobSpec WithHeads(const v1::JobSpec& spec, uint32_t heads) {
  v1::JobSpec with = spec;
  with.mutable_parallelism()->set_heads(heads);
  return with;
}

// What a job with this number would be refused for.
absl::Status CheckChoice(const v1::JobSpec& spec, const model::ModelConfig& model) {
  RETURN_IF_ERROR(jobspec::CheckHeadRanks(spec));
  ASSIGN_OR_RETURN(patterns::AttentionOptions attention,
                   jobspec::AttentionOptionsOf(spec.attention()));
  attention.head_ranks = static_cast<int>(jobspec::HeadRanks(spec.parallelism()));
  attention.head_groups = static_cast<int>(jobspec::HeadGroups(spec.parallelism()));
  RETURN_IF_ERROR(patterns::CheckHeads(attention, model.heads, model.kv_heads));
  const uint32_t window = spec.parallelism().ring_window();
  const uint32_t ring = jobspec::RingRanks(spec.parallelism());
  if (window == 0 || ring % window == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "parallelism.ring_window: %d does not divide the %d trainers of the ring", window, ring));
}

}  // namespace

HeadChoices HeadChoicesOf(const v1::JobSpec& spec, const model::ModelConfig& model,
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

}  // namespace ringleader::planner
