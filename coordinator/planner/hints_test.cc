// What reports teach of a pattern.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "coordinator/planner/planner.h"
#include "coordinator/planner/simulate/pricer.h"
#include "coordinator/planner/testing/planner_problems.h"
#include "model_shape/model_config.h"

namespace ringleader::planner {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

// Two reports of a job of 36 layers, of which the first is dense and the others visit 30 %.
std::vector<v1::StepReport> ReportsOfASparseJob() {
  std::vector<v1::StepReport> reports(2);
  for (v1::StepReport& report : reports) {
    for (uint32_t layer = 0; layer < 36; ++layer) {
      v1::LayerReport* const row = report.add_layers();
      row->set_layer(layer);
      row->set_density(layer == 0 ? 1.0 : 0.3);
    }
  }
  return reports;
}

TEST(HintsFromTest, WhatAnyChosenPatternVisitedIsWhatItsStepsArePricedAt) {
  using Pattern = v1::AttentionSpec;
  for (const Pattern::Pattern pattern : {Pattern::XATTENTION, Pattern::MOBA, Pattern::KEY_GROUPS,
                                         Pattern::BLOCK_TOPK, Pattern::ADASPA}) {
    v1::JobSpec spec = LongJob(4, 131072);
    spec.clear_attention();
    spec.mutable_attention()->set_pattern(pattern);
    spec.mutable_attention()->add_dense_layers(0);
    jobspec::ApplyDefaults(&spec);
    const ClusterShape cluster = Gpus(1, 4);
    const CostModel cost(spec, ThreeBillion(), cluster);
    const auto usual = MakePlan(spec, ThreeBillion(), cluster, cost);
    ASSERT_TRUE(usual.ok()) << usual.status();
    const auto learned = Predict(spec, ThreeBillion(), cluster, cost, *usual,
                                 HintsFrom(spec, ReportsOfASparseJob()));
    ASSERT_TRUE(learned.ok()) << learned.status();
    // One layer in 36 is dense, whatever the others visit.
    const double expected = (1.0 + 35 * 0.3) / 36;
    EXPECT_GT(std::abs(usual->prediction().density() - expected), 0.05) << pattern;
    EXPECT_NEAR(learned->density(), expected, 1e-6) << pattern;
    EXPECT_NE(learned->step_seconds(), usual->prediction().step_seconds()) << pattern;
  }
}

// Else their seconds beside those of the prediction look like a mistake.
TEST(HintsFromTest, ReasonsSayWhichDensityTheyCompareAtWhereThePredictionHasAnother) {
  const v1::JobSpec spec = LongJob(4, 131072);
  const ClusterShape cluster = Gpus(1, 4);
  const CostModel cost(spec, ThreeBillion(), cluster);
  const auto usual = MakePlan(spec, ThreeBillion(), cluster, cost);
  ASSERT_TRUE(usual.ok()) << usual.status();
  EXPECT_THAT(usual->reasons(), Not(Contains(HasSubstr("assumed density"))));
  const auto measured = MakePlan(spec, ThreeBillion(), cluster, cost, {.density = 0.375});
  ASSERT_TRUE(measured.ok()) << measured.status();
  ASSERT_GT(measured->reasons_size(), 1);
  EXPECT_EQ(
      measured->reasons(0),
      absl::StrFormat("compared at the pattern's assumed density (%.3g %%), not at the "
                      "prediction's (%.3g %%):",
                      100 * usual->prediction().density(), 100 * measured->prediction().density()));
  EXPECT_EQ(measured->reasons(1), usual->reasons(0));
}

TEST(HintsFromTest, AStepThatChoseNothingTellsNothing) {
  std::vector<v1::StepReport> reports(3);
  for (v1::StepReport& report : reports) {
    v1::LayerReport* const row = report.add_layers();
    row->set_density(0.3);
    if (&report == &reports[1]) continue;  // its documents were all attended to densely
    row->set_slashes(1000);
    row->set_verticals(4000);
  }
  const patterns::PatternHints hints = HintsFrom(LongJob(4, 131072), reports);
  EXPECT_EQ(hints.slashes, 1000);
  EXPECT_EQ(hints.verticals, 4000);
}

TEST(HintsFromTest, WhatPositionsAloneChooseIsNotTakenFromReports) {
  v1::JobSpec spec = LongJob(4, 131072);
  spec.clear_attention();
  spec.mutable_attention()->set_pattern(v1::AttentionSpec::SLIDING_WINDOW);
  jobspec::ApplyDefaults(&spec);
  EXPECT_EQ(HintsFrom(spec, ReportsOfASparseJob()), patterns::PatternHints());
}

}  // namespace
}  // namespace ringleader::planner
