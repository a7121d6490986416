#include "coordinator/planner/deal/reweigh.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "coordinator/planner/deal/plan_history.h"
#include "coordinator/planner/deal/sample_steps.h"

namespace ringleader::planner {
namespace {

constexpr double kNoticeable = 0.1;  // of a weight
// What attention of `row` takes at another density, over what it takes at its own.
double Factor(const v1::SampleWeight& row, double density, const balance::LatencyTable& measured) {
  const auto tokens = static_cast<double>(row.tokens());
  const double before = measured.Predict(tokens, row.density());
  return before > 0 ? measured.Predict(tokens, density) / before : density / row.density();
}

}  // namespace

void ObserveLengths(const v1::JobSpec& spec, const model::ModelConfig& model,
                    const v1::StepReport& report, balance::LengthDensities* densities) {
  for (const v1::LengthReport& bin : report.lengths()) {
    if (bin.causal_tiles() == 0) continue;
    const double density =
        static_cast<double>(bin.visited_tiles()) / static_cast<double>(bin.causal_tiles());
    densities->Observe(bin.tokens(), SparseDensity(spec, model, density));
  }
}

std::optional<v1::StepPlan> ReplanWeights(const v1::JobSpec& spec, const v1::StepPlan& current,
                                          const v1::StepReport& last,
                                          const balance::LengthDensities& densities,
                                          const balance::LatencyTable& measured) {
  const uint64_t step = last.step();
  if (step < current.weights_from_step() + StepsBetweenChanges(spec)) return std::nullopt;
  v1::StepPlan plan = current;
  double largest = 0, milliseconds = 0;
  for (v1::SampleWeight& row : *plan.mutable_sample_weights()) {
    const double before = row.milliseconds();
    double attention = row.attention_milliseconds();
    const std::optional<double> density = densities.Of(row.tokens());
    if (density.has_value() && row.density() > 0) {
      attention *= Factor(row, *density, measured);
      row.set_density(*density);
    }
    // Weights ascend.
    milliseconds = std::max(milliseconds, before - row.attention_milliseconds() + attention);
    row.set_milliseconds(milliseconds);
    row.set_attention_milliseconds(attention);
    largest = std::max(largest, std::abs(milliseconds / before - 1));
  }
  if (largest < kNoticeable) return std::nullopt;
  plan.set_version(current.version() + 1);
  plan.set_effective_step(step + LeadSteps(last.step_seconds()));
  DateWeights(current, &plan);
  plan.clear_reasons();
  plan.clear_prediction();
  plan.add_reasons(absl::StrFormat(
      "samples are dealt by the tiles that each length visited in the steps up to %d: a weight "
      "changes by %.0f %%",
      step, 100 * largest));
  return plan;
}

}  // namespace ringleader::planner
