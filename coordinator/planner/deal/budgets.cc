#include "coordinator/planner/deal/budgets.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "base/mean.h"
#include "jobspec/fields.h"

namespace ringleader::planner {
namespace {

constexpr double kLargestMass = 0.995;
constexpr double kNoticeable = 0.005;  // of mass
constexpr double kLargestStep = 1.5;   // factor on density in one go: the model holds only nearby

// The mass at which density is `factor` times that at `mass`.
double Scaled(double mass, double factor, double base, double tolerance) {
  const double wanted = 1 - std::exp(factor * std::log1p(-std::min(mass, kLargestMass)));
  return std::clamp(wanted, std::max(0.01, base - tolerance),
                    std::max(base, std::min(kLargestMass, base + tolerance)));
}

}  // namespace

std::optional<std::vector<v1::LayerBudget>> TuneBudgets(const v1::JobSpec& spec,
                                                        const v1::StepPlan& current,
                                                        std::span<const v1::StepReport> recent) {
  const v1::AttentionSpec& attention = spec.attention();
  const double tolerance = attention.balance_tolerance();
  if (tolerance <= 0 || !jobspec::Fits(*jobspec::FindField("attention.balance_tolerance"), spec)) {
    return std::nullopt;
  }
  const std::set<uint32_t> dense(attention.dense_layers().begin(), attention.dense_layers().end());
  std::map<uint32_t, Mean> densities;
  for (const v1::StepReport& report : recent) {
    if (report.plan_version() != current.version()) continue;
    for (const v1::LayerReport& layer : report.layers()) {
      if (layer.density() > 0) densities[layer.layer()].Add(layer.density());
    }
  }
  Mean anchor;
  for (const auto& [layer, density] : densities) {
    if (!dense.contains(layer)) anchor.Add(density.value());
  }
  if (anchor.count < 2) return std::nullopt;

  std::map<uint32_t, v1::LayerBudget> before;
  for (const v1::LayerBudget& budget : current.layer_budgets()) before[budget.layer()] = budget;
  bool changed = false;
  std::vector<v1::LayerBudget> budgets;
  for (const auto& [layer, density] : densities) {
    v1::LayerBudget budget;
    budget.set_layer(layer);
    budget.set_max_verticals(attention.max_verticals());
    budget.set_max_slashes(attention.max_slashes());
    budget.set_vertical_mass(attention.vertical_mass());
    budget.set_slash_mass(attention.slash_mass());
    if (const auto found = before.find(layer); found != before.end()) budget = found->second;
    budget.set_dense(dense.contains(layer));
    if (!budget.dense()) {
      const double factor =
          std::clamp(anchor.value() / density.value(), 1 / kLargestStep, kLargestStep);
      const double vertical =
          Scaled(budget.vertical_mass(), factor, attention.vertical_mass(), tolerance);
      const double slash = Scaled(budget.slash_mass(), factor, attention.slash_mass(), tolerance);
      changed |= std::abs(vertical - budget.vertical_mass()) > kNoticeable ||
                 std::abs(slash - budget.slash_mass()) > kNoticeable;
      budget.set_vertical_mass(vertical);
      budget.set_slash_mass(slash);
    }
    budgets.push_back(budget);
  }
  if (!changed) return std::nullopt;
  return budgets;
}

}  // namespace ringleader::planner
