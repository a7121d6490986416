// Charts' points: evenly spread, with both ends, whatever was thinned out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "coordinator/store/testing/opened_store.h"

namespace ringleader::store {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class SampleTest : public testing::OpenedStoreTest {
 protected:
  void PutSteps(uint64_t first, uint64_t last) {
    Write([&](WriteTransaction& t) {
      for (uint64_t step = first; step <= last; ++step) {
        v1::StepReport report;
        report.set_step(step);
        report.add_layers()->set_density(0.5);
        report.add_rank_tiles(7);
        report.add_rank_paces(7);
        if (absl::Status put = t.PutStep("a", report); !put.ok()) return put;
      }
      return absl::OkStatus();
    });
  }
  static std::vector<uint64_t> StepsOf(const std::vector<v1::StepReport>& reports) {
    std::vector<uint64_t> steps;
    for (const v1::StepReport& report : reports) steps.push_back(report.step());
    return steps;
  }
};

TEST_F(SampleTest, IsSpreadEvenlyWithBothEnds) {
  Create("a");
  const auto steps = [&](int count) {
    return StepsOf(Read([&](ReadTransaction& t) { return t.SampleSteps("a", count); }).value());
  };
  EXPECT_THAT(steps(5), IsEmpty());
  PutSteps(1, 1);
  EXPECT_THAT(steps(5), ElementsAre(1));
  PutSteps(2, 3);
  EXPECT_THAT(steps(5), ElementsAre(1, 2, 3));
  PutSteps(4, 101);
  EXPECT_THAT(steps(5), ElementsAre(1, 26, 51, 76, 101));
  EXPECT_THAT(steps(2), ElementsAre(1, 101));
  // Another job's are none of them, and neither are those of no job.
  Create("b");
  EXPECT_THAT(*Read([](ReadTransaction& t) { return t.SampleSteps("b", 5); }), IsEmpty());
  EXPECT_THAT(*Read([](ReadTransaction& t) { return t.SampleSteps("none", 5); }), IsEmpty());
}

// Older steps lose their layers, all but every 16th.
TEST_F(SampleTest, FindsStepsThatKeepTheirLayers) {
  Create("a");
  PutSteps(1, 4096);
  std::vector<uint64_t> steps;
  const absl::Status visited = Read([&](ReadTransaction& t) {
    return t.VisitStepsWithLayers("a", 40, [&](const v1::StepReport& report) {
      EXPECT_EQ(report.layers_size(), 1) << report.step();
      steps.push_back(report.step());
    });
  });
  EXPECT_TRUE(visited.ok()) << visited;
  ASSERT_THAT(steps, SizeIs(40));
  EXPECT_EQ(steps.front(), 1u);
  EXPECT_EQ(steps.back(), 4096u);
  const auto thin = Read([](ReadTransaction& t) { return t.SampleSteps("a", 40); });
  for (const v1::StepReport& report : *thin) {
    EXPECT_EQ(report.layers_size(), 0) << report.step();
    EXPECT_EQ(report.rank_tiles_size(), 0) << report.step();
    EXPECT_EQ(report.rank_paces_size(), 0) << report.step();
  }
}

TEST_F(SampleTest, EvaluationsAreSampledByTheirSteps) {
  Create("a");
  Write([](WriteTransaction& t) {
    for (const uint64_t step : {10, 20, 30, 40, 50}) {
      v1::EvalReport report;
      report.set_step(step);
      if (absl::Status put = t.PutEval("a", report); !put.ok()) return put;
    }
    return absl::OkStatus();
  });
  const auto sample = Read([](ReadTransaction& t) { return t.SampleEvals("a", 3); });
  ASSERT_THAT(*sample, SizeIs(3));
  EXPECT_EQ((*sample)[1].step(), 30u);
}

// A job is evaluated before its first step.
TEST_F(SampleTest, TheEvaluationOfStepZeroIsOne) {
  Create("a");
  const auto sampled = [&] {
    std::vector<uint64_t> steps;
    for (const v1::EvalReport& report :
         *Read([](ReadTransaction& t) { return t.SampleEvals("a", 3); })) {
      steps.push_back(report.step());
    }
    return steps;
  };
  EXPECT_THAT(sampled(), ElementsAre());
  std::vector<uint64_t> reported;
  for (const uint64_t step : {0, 10, 20}) {
    Write([&](WriteTransaction& t) {
      v1::EvalReport report;
      report.set_step(step);
      return t.PutEval("a", report);
    });
    reported.push_back(step);
    EXPECT_EQ(sampled(), reported);
  }
}

}  // namespace
}  // namespace ringleader::store
