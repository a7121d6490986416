#include "coordinator/planner/deal/budgets.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "coordinator/planner/testing/planner_problems.h"

namespace ringleader::planner {
namespace {

class BudgetsTest : public ::testing::Test {
 protected:
  BudgetsTest() : spec_(LongJob(4, 131072)) {
    spec_.mutable_attention()->set_balance_tolerance(0.08);
    spec_.mutable_attention()->add_dense_layers(0);
    plan_.set_version(1);
  }

  // Layers whose densities follow the law with constants of their own, under `plan`.
  v1::StepReport Report(const v1::StepPlan& plan, uint64_t step) const {
    v1::StepReport report;
    report.set_step(step);
    report.set_plan_version(plan.version());
    for (int l = 0; l < 5; ++l) {
      double mass = 0.9;
      for (const auto& budget : plan.layer_budgets()) {
        if (budget.layer() == static_cast<uint32_t>(l)) mass = budget.slash_mass();
      }
      v1::LayerReport* layer = report.add_layers();
      layer->set_layer(l);
      layer->set_density(l == 0 ? 1.0 : -scale_[l] * std::log(1 - mass));
    }
    return report;
  }

  static double Imbalance(const v1::StepReport& report) {
    double sum = 0, largest = 0;
    for (const auto& layer : report.layers()) {
      if (layer.layer() == 0) continue;
      sum += layer.density();
      largest = std::max(largest, layer.density());
    }
    return largest * 4 / sum;
  }

  v1::JobSpec spec_;
  v1::StepPlan plan_;
  double scale_[5] = {0, 0.030, 0.024, 0.021, 0.018};
};

TEST_F(BudgetsTest, EvenOutTheLayersWithinTheTolerance) {
  const double before = Imbalance(Report(plan_, 1));
  v1::StepPlan plan = plan_;
  int changes = 0;
  for (uint64_t step = 1; step < 20; ++step) {
    const std::vector<v1::StepReport> recent = {Report(plan, step)};
    const auto next = Replan(spec_, plan, recent);
    if (!next.has_value()) break;
    EXPECT_EQ(next->version(), plan.version() + 1);
    EXPECT_GT(next->effective_step(), step + 1);
    plan = *next;
    ++changes;
  }
  EXPECT_GT(changes, 0);
  EXPECT_LT(changes, 19) << "budgets never settle";
  const double after = Imbalance(Report(plan, 20));
  EXPECT_GT(before, 1.25);
  EXPECT_LT(after, 1.1);
  for (const auto& budget : plan.layer_budgets()) {
    EXPECT_EQ(budget.dense(), budget.layer() == 0);
    EXPECT_GE(budget.slash_mass(), 0.9 - 0.08 - 1e-9);
    EXPECT_LE(budget.slash_mass(), 0.9 + 0.08 + 1e-9);
  }
}

TEST_F(BudgetsTest, NothingMovesUnlessAllowed) {
  const std::vector<v1::StepReport> recent = {Report(plan_, 1)};
  spec_.mutable_attention()->set_balance_tolerance(0);
  EXPECT_FALSE(Replan(spec_, plan_, recent).has_value());
  spec_.mutable_attention()->set_balance_tolerance(0.08);
  EXPECT_TRUE(Replan(spec_, plan_, recent).has_value());
  spec_.mutable_attention()->set_select(v1::AttentionSpec::TOP_K);
  EXPECT_FALSE(Replan(spec_, plan_, recent).has_value());
  EXPECT_FALSE(Replan(spec_, plan_, {}).has_value());
}

TEST_F(BudgetsTest, ReportsOfAnOlderPlanDoNotCount) {
  v1::StepPlan newer = plan_;
  newer.set_version(2);
  const std::vector<v1::StepReport> recent = {Report(plan_, 1)};
  EXPECT_FALSE(Replan(spec_, newer, recent).has_value());
}

}  // namespace
}  // namespace ringleader::planner
