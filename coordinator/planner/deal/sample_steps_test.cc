#include "coordinator/planner/deal/sample_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "coordinator/planner/testing/planner_problems.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::planner {
namespace {

using ::testing::HasSubstr;

class SampleStepsTest : public ::testing::Test {
 protected:
  SampleStepsTest()
      : spec_(LongJob(1, 65536)), cluster_(TypicalCluster(v1::ResourcesSpec::CUDA, 1, 2)) {
    spec_.mutable_parallelism()->set_data(2);
    spec_.mutable_resources()->set_trainers(2);
    spec_.mutable_training()->set_global_batch(8);
    spec_.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
  }

  v1::StepPlan Plan(const CostModel& costs) const {
    const auto plan = MakePlan(spec_, ThreeBillion(), cluster_, costs);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.value_or(v1::StepPlan());
  }
  absl::StatusOr<v1::Prediction> Predict(const std::vector<uint64_t>& lengths) const {
    const model::ModelConfig model = ThreeBillion();
    const CostModel costs(spec_, model, cluster_);
    const patterns::PatternHints hints;
    Pricer pricer(spec_, model, cluster_, hints);
    return PredictSamples(spec_, costs, Plan(costs), lengths, pricer);
  }
  // Attention of the job's shape takes the square of its tokens times its density, at any length.
  balance::LatencyTable Measured(double ms_per_square) const {
    std::vector<balance::Row> rows;
    for (const int64_t tokens : {4096, 65536}) {
      for (const double density : {0.01, 1.0}) {
        balance::Row row = {.pattern = "vertical_slash",
                            .tile = static_cast<int>(spec_.attention().tile()),
                            .heads = 16,
                            .kv_heads = 2,
                            .head_dim = 128,
                            .tokens = tokens,
                            .density = density};
        row.p50_ms = row.p90_ms = ms_per_square * static_cast<double>(tokens * tokens) * density;
        row.forward_p50_ms = row.p50_ms / 3;
        rows.push_back(row);
      }
    }
    return *balance::MakeTable(std::move(rows));
  }

  v1::JobSpec spec_;
  ClusterShape cluster_;
};

TEST_F(SampleStepsTest, WeightsSayWhatAttentionWasMeasuredToTake) {
  constexpr double kMsPerSquare = 1e-7;
  const CostModel costs(spec_, ThreeBillion(), cluster_, Measured(kMsPerSquare));
  const v1::StepPlan plan = Plan(costs);
  for (const v1::SampleWeight& row : plan.sample_weights()) {
    if (row.tokens() < 4096) continue;
    const auto tokens = static_cast<double>(row.tokens());
    const double measured = 36 * kMsPerSquare * tokens * tokens * row.density();
    EXPECT_NEAR(row.attention_milliseconds() / measured, 1, 0.03) << row.tokens();
    EXPECT_GT(row.milliseconds(), row.attention_milliseconds());
  }
}

TEST_F(SampleStepsTest, StepsAreThoseOfTheLengths) {
  const auto full = Predict({65536});
  ASSERT_TRUE(full.ok()) << full.status();
  // Eight samples of all tokens in two groups are what the plan predicts without lengths.
  const CostModel costs(spec_, ThreeBillion(), cluster_);
  const v1::StepPlan plan = Plan(costs);
  EXPECT_NEAR(full->step_seconds() / plan.prediction().step_seconds(), 1, 1e-6);
  EXPECT_NEAR(full->tokens_per_second() / plan.prediction().tokens_per_second(), 1, 1e-6);
  EXPECT_NEAR(full->model_flops() / plan.prediction().model_flops(), 1, 1e-6);
  EXPECT_NEAR(full->density() / plan.prediction().density(), 1, 1e-6);
  EXPECT_EQ(full->dealt_imbalance(), 1);

  const auto mixed = Predict({65536, 2048, 3000, 5000});
  ASSERT_TRUE(mixed.ok()) << mixed.status();
  EXPECT_LT(mixed->step_seconds(), 0.6 * full->step_seconds());
  EXPECT_GT(mixed->dealt_imbalance(), 1);
  EXPECT_GT(mixed->sampled_steps(), 0u);
  EXPECT_NEAR(mixed->attention_seconds() + mixed->index_seconds() + mixed->linear_seconds() +
                  mixed->wait_seconds() + mixed->exposed_communication_seconds() +
                  mixed->optimizer_seconds(),
              mixed->step_seconds(), 1e-9);
}

// Groups that meet at every micro-batch wait for the longer of two.
TEST_F(SampleStepsTest, SamplesDealtInOrderMeetAtEach) {
  const std::vector<uint64_t> lengths = {65536, 2048, 3000, 5000};
  const auto dealt = Predict(lengths);
  spec_.mutable_data()->set_dealing(v1::DataSpec::IN_ORDER);
  const auto in_order = Predict(lengths), alike = Predict({65536});
  ASSERT_TRUE(dealt.ok() && in_order.ok() && alike.ok());
  EXPECT_GT(in_order->step_seconds(), 1.2 * dealt->step_seconds());
  EXPECT_LT(in_order->step_seconds(), alike->step_seconds());
  EXPECT_GT(in_order->dealt_imbalance(), dealt->dealt_imbalance());
  EXPECT_NEAR(in_order->model_flops() / dealt->model_flops(), 1, 1e-6) << "the same samples";
  spec_.mutable_data()->set_dealing(v1::DataSpec::BY_COST);
  // So do those whose sums are in the same order every time.
  spec_.mutable_training()->set_deterministic(true);
  const auto deterministic = Predict(lengths);
  ASSERT_TRUE(deterministic.ok());
  EXPECT_GT(deterministic->step_seconds(), dealt->step_seconds());
  spec_.mutable_training()->set_deterministic(false);
  EXPECT_NEAR(Predict({65536})->step_seconds() / alike->step_seconds(), 1, 1e-9);
}

TEST_F(SampleStepsTest, LengthsThatFitNoMicroBatchAreRefused) {
  EXPECT_THAT(std::string(Predict({}).status().message()), HasSubstr("no length"));
  EXPECT_THAT(std::string(Predict({100, 65537}).status().message()),
              HasSubstr("length 2 of the samples is 65537 tokens"));
  EXPECT_FALSE(Predict({0}).ok());
}

// What the slowest ranks had is in the report: the fit finds the machine behind it.
TEST_F(SampleStepsTest, ReportsOfSamplesTeachTheCostModel) {
  const model::ModelConfig model = ThreeBillion();
  CostModel costs(spec_, model, cluster_);
  v1::StepReport report;
  report.set_most_tiles(1000);
  report.mutable_phases()->set_linear(1);
  report.mutable_phases()->set_attention_forward(0.1);
  costs.ObserveStep(spec_, model, report);
  EXPECT_EQ(costs.observations(), 0) << "of an earlier release, which did not say";
  constexpr double kLinearPerToken = 3e-6;  // of a layer
  for (uint64_t step = 1; step < 200; ++step) {
    report.set_group_micro_batches(2 + step % 3);
    report.set_group_tokens(20000 + step * 7919 % 50000);
    report.mutable_phases()->set_linear(kLinearPerToken * 36 *
                                        static_cast<double>(report.group_tokens()));
    costs.ObserveStep(spec_, model, report);
  }
  EXPECT_EQ(costs.observations(), 199);
  EXPECT_NEAR(costs.Seconds(Phase::kLinear, {.rows = 1e5}) / (1e5 * kLinearPerToken), 1, 0.05);
}

// Reports tell what share of a whole sequence was visited, of a document alone they do not.
TEST_F(SampleStepsTest, ADocumentAloneHasNotTheDensityOfItsSequence) {
  spec_.mutable_data()->set_batching(v1::DataSpec::PACKED);
  const model::ModelConfig model = ThreeBillion();
  const CostModel costs(spec_, model, cluster_);
  v1::StepPlan plan = Plan(costs);
  plan.set_layout(v1::ParallelismSpec::DOCUMENTS);
  const auto price = [&](double density) {
    const patterns::PatternHints hints = {.density = density};
    Pricer pricer(spec_, model, cluster_, hints);
    const auto alone = pricer.PriceAlone(plan, costs, /*tokens=*/8192, /*find_exposed=*/false);
    EXPECT_TRUE(alone.ok()) << alone.status();
    return alone.value_or(v1::Prediction());
  };
  EXPECT_EQ(price(0.01).density(), price(0).density());
  EXPECT_EQ(price(0.01).attention_seconds(), price(0).attention_seconds());
}

// A short sample keeps more than the share: as many groups as its place in a whole sequence allows.
TEST_F(SampleStepsTest, ShortSamplesKeepTheGroupsOfTheJobsBudget) {
  spec_.mutable_attention()->Clear();
  spec_.mutable_attention()->set_pattern(v1::AttentionSpec::KEY_GROUPS);
  jobspec::ApplyDefaults(&spec_);
  const v1::StepPlan plan = Plan(CostModel(spec_, ThreeBillion(), cluster_));
  ASSERT_GT(plan.sample_weights_size(), 4);
  const kernels::KeyGroupBudget budget =
      kernels::KeyGroupBudgetOf(static_cast<float>(spec_.attention().density()), /*tokens=*/65536);
  for (const v1::SampleWeight& row : plan.sample_weights()) {
    const auto blocks = static_cast<int64_t>(row.tokens() / kernels::kGroupTile);
    double tiles = 0;
    for (int64_t own = 0; own < blocks; ++own) {
      tiles += 1 + kernels::TilesOfGroups(budget.MostGroups(own * kernels::kGroupTile, 0));
    }
    const double causal = static_cast<double>(blocks * (blocks + 1)) / 2;
    EXPECT_NEAR(row.density(), tiles / causal, 0.02 * tiles / causal) << row.tokens();
  }
  EXPECT_GT(plan.sample_weights(0).density(), 2 * plan.sample_weights().rbegin()->density());
}

}  // namespace
}  // namespace ringleader::planner
