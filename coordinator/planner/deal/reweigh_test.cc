#include "coordinator/planner/deal/reweigh.h"

#include <gtest/gtest.h>

#include "coordinator/planner/testing/planner_problems.h"

namespace ringleader::planner {
namespace {

class ReweighTest : public ::testing::Test {
 protected:
  ReweighTest() : spec_(LongJob(1, 65536)) {
    spec_.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
    spec_.mutable_attention()->add_dense_layers(0);
    model_.layers = 4;
    plan_.set_version(3);
    for (const uint64_t tokens : {4096, 16384, 65536}) {
      v1::SampleWeight* const row = plan_.add_sample_weights();
      row->set_tokens(tokens);
      row->set_milliseconds(static_cast<double>(tokens) * 2e-3);
      row->set_attention_milliseconds(static_cast<double>(tokens) * 1e-3);
      row->set_density(0.2);
    }
    last_.set_step(100);
    last_.set_step_seconds(0.5);
  }

  // Sparse layers' density of the longest, in `steps` reports.
  void Visit(double density, int steps) {
    v1::StepReport report;
    v1::LengthReport* const bin = report.add_lengths();
    bin->set_tokens(65536);
    bin->set_causal_tiles(4'000'000);
    bin->set_visited_tiles(static_cast<uint64_t>(1'000'000 * (1 + 3 * density)));
    for (int i = 0; i < steps; ++i) ObserveLengths(spec_, model_, report, &densities_);
  }
  std::optional<v1::StepPlan> Next(const balance::LatencyTable& measured = {}) const {
    return ReplanWeights(spec_, plan_, last_, densities_, measured);
  }

  v1::JobSpec spec_;
  model::ModelConfig model_;
  v1::StepPlan plan_;
  v1::StepReport last_;
  balance::LengthDensities densities_;
};

TEST_F(ReweighTest, WeightsFollowWhatEachLengthVisited) {
  EXPECT_FALSE(Next().has_value());
  Visit(0.1, 2);
  EXPECT_FALSE(Next().has_value()) << "two steps are chance";
  Visit(0.1, 30);
  const auto next = Next();
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->version(), 4u);
  EXPECT_EQ(next->effective_step(), 110u) << "five seconds are ten steps";
  EXPECT_NEAR(next->sample_weights(2).density(), 0.1, 1e-6);
  EXPECT_NEAR(next->sample_weights(2).attention_milliseconds(), 65.536 / 2, 1e-3);
  EXPECT_NEAR(next->sample_weights(2).milliseconds(), 1.5 * 65.536, 1e-3);
  EXPECT_EQ(next->sample_weights(1).milliseconds(), plan_.sample_weights(1).milliseconds());
  Visit(0.2, 200);
  EXPECT_FALSE(Next().has_value()) << "less than a tenth";
}

TEST_F(ReweighTest, AttentionTakesWhatWasMeasuredAtThatDensity) {
  Visit(0.1, 30);
  std::vector<balance::Row> rows;
  for (const double density : {0.05, 0.1, 0.2}) {
    // Half of what 0.2 takes is there at any density.
    const double ms = 10 * (0.5 + density / 0.4);
    rows.push_back({.pattern = "vertical_slash",
                    .tile = 64,
                    .heads = 1,
                    .kv_heads = 1,
                    .head_dim = 64,
                    .tokens = 65536,
                    .density = density,
                    .p50_ms = ms,
                    .p90_ms = ms,
                    .forward_p50_ms = ms / 3});
  }
  const auto next = Next(*balance::MakeTable(std::move(rows)));
  ASSERT_TRUE(next.has_value());
  EXPECT_NEAR(next->sample_weights(2).attention_milliseconds(), 0.75 * 65.536, 1e-3);
}

// The steps that a resume trains again are dealt by what dealt them first.
TEST_F(ReweighTest, APlanSaysWhatDealtTheStepsBeforeIt) {
  spec_.mutable_checkpoint()->set_every_steps(200);
  double density = 0.2;
  std::vector<v1::StepPlan> plans = {plan_};
  for (uint64_t step = 1; step < 3000; ++step) {
    last_.set_step(step);
    if (step % 300 == 0) density = density > 0.15 ? 0.1 : 0.2;
    Visit(density, 1);
    auto next = Next();
    if (!next.has_value()) continue;
    EXPECT_GE(step, plan_.weights_from_step() + 100);
    plan_ = *next;
    plans.push_back(plan_);
  }
  ASSERT_GT(plans.size(), 6u);
  const v1::StepPlan& last = plans.back();
  ASSERT_EQ(last.earlier_weights_size(), 5);
  for (int i = 0; i < 5; ++i) {
    const v1::StepPlan& earlier = plans[plans.size() - 6 + i];
    EXPECT_EQ(last.earlier_weights(i).from_step(), earlier.weights_from_step());
    ASSERT_EQ(last.earlier_weights(i).sample_weights_size(), 3);
    EXPECT_EQ(last.earlier_weights(i).sample_weights(2).milliseconds(),
              earlier.sample_weights(2).milliseconds());
  }
}

}  // namespace
}  // namespace ringleader::planner
